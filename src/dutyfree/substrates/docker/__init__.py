"""The substrate ``docker``: one container per sandbox, over the Docker API.

Start with ``substrate``. ``engine`` is the HTTP client; ``execution`` runs one command; ``sandbox`` makes a
container a sandbox; ``images`` turns recipes into images; ``export`` copies an image into the layer store;
``gc`` removes leftovers. This room imports the contract, ``substrates.local``, ``study_image`` and the
engine's ``layers.run_stage``, ``images``, ``store`` and ``host.proc``.
"""

from dutyfree.substrates.docker.engine import socket_path
from dutyfree.substrates.docker.images import import_study
from dutyfree.substrates.docker.substrate import Docker, DockerConfig, adopt_image

__all__ = ["Docker", "DockerConfig", "adopt_image", "import_study", "socket_path"]
