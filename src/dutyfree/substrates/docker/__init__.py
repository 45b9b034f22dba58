"""The ``docker`` substrate.

``reaching`` finds the engine, ``http`` speaks to it; ``execution`` runs one command, ``files`` and
``sandbox`` make a container a sandbox of it; ``images`` turns recipes into images; ``substrate`` opens and
creates, ``leftovers`` cleans up.
"""

from dutyfree.substrates.docker.engine import socket_path
from dutyfree.substrates.docker.images import import_study
from dutyfree.substrates.docker.substrate import Docker, DockerConfig, adopt_image

__all__ = ["Docker", "DockerConfig", "adopt_image", "import_study", "socket_path"]
