"""The substrate ``docker``: one container per sandbox, over the Docker API.

Start with ``substrate``. ``engine`` is the HTTP client; ``containers`` makes containers, ``ready`` keeps some
in advance; ``images`` turns recipes into images. A container is a sandbox by ``sandbox`` and ``execution``,
with the engine's exec, or by ``guest``, with our init. ``ending`` says why one has ended; ``export`` copies
an image into the layer store; ``gc`` removes leftovers. This room imports the contract, ``substrates.local``,
``study_image``, and of dutyfree's engine ``sandbox`` and the rooms below it.
"""

from dutyfree.substrates.docker.config import DockerConfig
from dutyfree.substrates.docker.engine import socket_path
from dutyfree.substrates.docker.images import import_study
from dutyfree.substrates.docker.substrate import Docker, adopt_image

__all__ = ["Docker", "DockerConfig", "adopt_image", "import_study", "socket_path"]
