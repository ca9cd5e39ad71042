"""The claims of a service account token, read without verifying its signature."""

import base64
import json
from dataclasses import dataclass

MAX_TOKEN_LENGTH = 16 * 1024
"""Characters of a token; a projected token has about 1,000."""

_MAX_EXPIRY = 2**53
"""No token expires later. Larger integers may not be exact as floats."""


@dataclass(frozen=True)
class TokenClaims:
    """The claims of a JSON Web Token. They are not verified, so they can only disqualify a token."""

    audiences: tuple[str, ...]
    expires_at: int  # when the token expires, in seconds since 1970


def read_claims(token: str) -> TokenClaims | None:
    """Return the claims of a token; None if it is not a JSON Web Token with an audience and an expiry."""
    parts = token.split(".")
    if len(parts) != 3 or not all(parts) or len(token) > MAX_TOKEN_LENGTH:
        return None
    try:
        payload = parts[1]
        members = json.loads(base64.b64decode(payload + "=" * (-len(payload) % 4), b"-_", validate=True))
    except (ValueError, RecursionError):
        return None
    if not isinstance(members, dict):
        return None
    audiences, expires_at = members.get("aud"), members.get("exp")
    if isinstance(audiences, str):
        audiences = [audiences]
    if not isinstance(audiences, list) or not all(isinstance(audience, str) for audience in audiences):
        return None
    if not isinstance(expires_at, int) or not 0 <= expires_at <= _MAX_EXPIRY:
        return None
    return TokenClaims(tuple(audiences), expires_at)
