"""The compiled CPU backend: C++ behind a plain C interface, reached through ctypes."""
