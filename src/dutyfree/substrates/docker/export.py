"""Copy an image of a Docker engine into the layer store of the native engine."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.engine.images import find
from dutyfree.engine.images.install import LeasedImage, Progress
from dutyfree.engine.store.store import Store
from dutyfree.substrates.docker.engine import API, Engine, EngineError, EngineLost, socket_path
from dutyfree.substrates.docker.images import identify


async def bring(name: str, kept: str | None = None, progress: Progress | None = None) -> LeasedImage:
    """Copy the image ``docker-daemon:name`` into the store, if it is not there yet. Raises CreateError."""
    reference = name.removeprefix(find.DAEMON)
    store = Store()
    try:
        async with Engine(socket_path(None)) as engine:
            await engine.negotiate(API)
            identity = await identify(engine, reference)
            if identity is None:
                raise CreateError(
                    f"the Docker engine has no image {reference}", remedy=f"`docker pull {reference}`"
                )
            held = await find.find_stored(kept or name, identity, store)
            return held or await _copy(engine, store, reference, kept or name, identity, progress)
    except Unavailable as error:
        raise CreateError(error.message, remedy=error.remedy) from error
    except EngineLost as error:
        raise CreateError(str(error), remedy="start the Docker engine, or pull from a registry") from error
    except EngineError as error:
        raise CreateError(f"the Docker engine could not export {reference}: {error}") from error


async def _copy(
    engine: Engine, store: Store, reference: str, kept: str, identity: str, progress: Progress | None
) -> LeasedImage:
    scratch = store.scratch()
    directory = await anyio.to_thread.run_sync(scratch.__enter__)
    try:
        tar = directory / "image.tar"
        await _save(engine, reference, tar)
        return await find.import_image(str(tar), kept, progress, store, identity)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(scratch.__exit__, None, None, None)


async def _save(engine: Engine, reference: str, target: Path) -> None:
    async with (
        engine.stream("GET", f"/images/{reference}/get") as response,
        await anyio.open_file(target, "wb") as file,
    ):
        async for piece in response.pieces():
            await file.write(piece)
