"""The stored jobs: the tables, the databases, and the functions that read and change them.

The event loop uses `database`. `store` has the functions of a connection, and `backends` the databases.
Nothing here depends on HTTP.
"""
