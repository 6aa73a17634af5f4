"""The edge towards clients: the hot path below ASGI, and the FastAPI app for everything else."""
