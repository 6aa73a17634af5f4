"""`python -m omni_proxy` is the command `omni-proxy`."""

from omni_proxy.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
