"""The dashboard: the page at ``/`` that shows what the server does.

``static`` has its files: HTML, CSS and ES modules, which a browser runs as they are. ``pages`` serves them.
Start reading at ``static/main.js``.
"""
