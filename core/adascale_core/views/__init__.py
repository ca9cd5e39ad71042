"""The metrics service's answers about jobs, as frozen dataclasses.

The service builds its JSON from these and the client parses the JSON into them, so both sides have the same
fields. `AllocationView`, the answer that agents wait for, is in `messages.allocation`.
"""
