"""What a sandbox starts from.

``reference`` reads names, ``registry`` and ``credentials`` speak to registries, ``manifest`` says what an
image consists of; ``download`` fetches a blob, ``streams`` and ``unpack`` make a directory of it, ``squash``
one of many. ``store`` keeps the directories for all; ``pull`` fills it from registries, ``archives`` from
this machine; ``library`` does both for those who await. ``rootfs`` hands the layers to the launcher.
"""
