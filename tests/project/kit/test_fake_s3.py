"""The fake object store fulfils the contract of real ones, so that tests with it apply to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from tests.contracts.bucket import BucketContract, Rig
from tests.support.fakes.s3 import TOKEN, FakeS3

pytestmark = pytest.mark.standard


class FakeRig:
    """Rig of the fake store, on loopback in this process."""

    def __init__(self, fake: FakeS3) -> None:
        self.fake, self.bucket = fake, "models"
        fake.keeps_time, fake.page = True, 1000

    def env(self) -> dict[str, str]:
        """See Rig."""
        return self.fake.env()

    async def session(self) -> dict[str, str]:
        """See Rig."""
        self.fake.token = TOKEN
        return self.fake.env()

    async def put(self, key: str, content: bytes, *, summed: bool = False) -> None:
        """See Rig."""
        self.fake.objects[key] = content
        self.fake.summed = summed

    async def put_parts(self, key: str, parts: Sequence[bytes]) -> None:
        """See Rig."""
        self.fake.objects[key] = b"".join(parts)
        self.fake.parts[key] = len(parts)

    async def show_all(self) -> None:
        """See Rig."""
        self.fake.open = True


class TestFakeS3(BucketContract):
    """Runs BucketContract on the fake store."""

    @pytest.fixture
    async def rig(self) -> AsyncIterator[Rig]:
        fake = FakeS3({})
        async with fake.serving():
            yield FakeRig(fake)
