"""The messages between workers, api and controller, as frozen dataclasses.

Their fields have the names of the JSON members. The api validates the JSON (pydantic) before it builds a
message.
"""
