"""The metrics service: where workers post their gain and meet the controller.

This package may import FastAPI, pydantic and SQLAlchemy. It holds no rule of its own: what a report may
contain and when an allocation becomes active is decided in `adascale_core`. Here it is stored, passed to
the core's functions, and answered.
"""
