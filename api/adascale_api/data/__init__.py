"""The stored jobs: the tables, the databases, and the functions that read and change them.

`database` is what the event loop uses. `store` has the functions of a connection, and `backends` the databases.
Nothing here depends on HTTP.
"""
