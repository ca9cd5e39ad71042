"""The JSON of requests and answers, as pydantic models, and the messages about their fields."""
