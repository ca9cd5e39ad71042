"""Connections, requests and answers, whatever they are about: limits, the parsing of bodies, files, OpenAPI."""
