"""The JSON bodies of requests and answers, as pydantic models, and the errors of their fields."""
