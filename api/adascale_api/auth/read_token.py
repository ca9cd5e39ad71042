"""A token for people and programs that only read, beside the tokens of workers and the controller."""

from adascale_api.auth.authorization import Authorizer, Role
from adascale_api.errors import UnauthorizedError


class ReadTokenAuthorizer:
    """Authorizes the bearers of a read token to read all jobs, and others by another authorizer."""

    def __init__(self, readers: Authorizer, others: Authorizer) -> None:
        self._readers = readers
        self._others = others

    async def authorize(self, token: str, role: Role, job_id: str | None, client: str = "") -> None:
        """Return if the token has the role."""
        if role is Role.READER:
            try:
                await self._readers.authorize(token, role, job_id, client)
            except UnauthorizedError:
                pass  # another token
            else:
                return
        await self._others.authorize(token, role, job_id, client)

    async def close(self) -> None:
        """Close connections."""
        await self._readers.close()
        await self._others.close()
