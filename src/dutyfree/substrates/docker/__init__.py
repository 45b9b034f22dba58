"""The ``docker`` substrate.

``http`` speaks to the engine; ``execution`` runs one command, ``files`` and ``sandbox`` make a container
a sandbox of it; ``images`` turns recipes into images; ``substrate`` opens, creates and cleans up.
"""

from dutyfree.substrates.docker.images import import_study
from dutyfree.substrates.docker.substrate import Docker, DockerConfig, adopt_image, socket_path

__all__ = ["Docker", "DockerConfig", "adopt_image", "import_study", "socket_path"]
