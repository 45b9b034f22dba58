"""Images: from a name to layers in the store, and from layers to a sandbox's root file system.

``find`` gets an image by any kind of name. ``pull`` fetches it from a registry (``reference``, ``registry``,
``http``, ``credentials``, ``mirrors``, ``manifest``, ``download``) or from a local file (``archives``).
``install`` unpacks its layers into the store (``streams``, ``tar_reader``, ``unpack``); ``pack`` is the
reverse. ``rootfs`` hands layers to the launcher. May import ``store``, ``launcher`` and ``host``.
"""
