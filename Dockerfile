# Two images from one file:
#   docker build --target gateway -t omni-proxy .
#   docker build --target worker -t omni-proxy-worker .
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m venv /opt/omni && /opt/omni/bin/pip install --no-cache-dir .

FROM build AS build-worker
RUN /opt/omni/bin/pip install --no-cache-dir '.[worker]'

FROM python:3.11-slim AS base
RUN useradd --system --create-home --uid 10001 omni
ENV PATH=/opt/omni/bin:$PATH PYTHONUNBUFFERED=1
USER omni
WORKDIR /home/omni

FROM base AS worker
COPY --from=build-worker /opt/omni /opt/omni
EXPOSE 8100 5600
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8100/health', timeout=2)"]
ENTRYPOINT ["omni-proxy", "worker", "--host", "0.0.0.0", "--port", "8100", "--side-channel-port", "5600"]

FROM base AS gateway
COPY --from=build /opt/omni /opt/omni
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["omni-proxy", "serve", "-c"]
CMD ["/etc/omni-proxy/config.yaml"]
