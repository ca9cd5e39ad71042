"""The metrics service: where workers post their gain and meet the controller.

This package may import FastAPI, uvicorn, pydantic, SQLAlchemy and the Prometheus client; its store and its
database know nothing of the web. It holds no rule of its own: what a batch may be and when an allocation
becomes active is decided in `adascale_core`. Here it is stored, passed to the core's functions, and
answered.
"""
