"""A substrate whose streams take their input as bytes only, as those of E2B do."""

from __future__ import annotations

from contextlib import asynccontextmanager

from dutyfree.contract.arguments import check_command
from dutyfree.substrates.scripted import Scripted


class BytesOnly(Scripted):
    """Its sandboxes answer with their input."""

    @asynccontextmanager
    async def sandbox(self, recipe=None, **settings):
        async with super().sandbox(recipe, **settings) as sandbox:
            stream = sandbox.stream

            async def refuse_iterables(command, *, stdin=None, **options):
                check_command(command, stdin=stdin)
                async for item in stream(command, stdin=stdin, **options):
                    yield item

            sandbox.stream = refuse_iterables  # type: ignore[method-assign]
            yield sandbox
