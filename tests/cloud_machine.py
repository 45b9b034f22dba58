"""The machine of an instance, for one connection: an sshd on stdin and stdout, set up by the user data.

moto's instances do not run. ``ssh`` starts this as its ProxyCommand: SERVER DIRECTORY INSTANCE [HOST_KEY].
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from pathlib import Path
from urllib.request import Request, urlopen

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""

_SSHD = """
HostKey {root}/host_key
AuthorizedKeysFile {root}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
PrintMotd no
"""


def _user_data(server: str, instance: str) -> str:
    query = f"Action=DescribeInstanceAttribute&Version=2016-11-15&Attribute=userData&InstanceId={instance}"
    credential = "Credential=any/20260101/us-east-1/ec2/aws4_request"
    signed = {"Authorization": f"AWS4-HMAC-SHA256 {credential}, SignedHeaders=host, Signature=any"}
    with urlopen(Request(f"{server}/?{query}", headers=signed)) as answer:
        text = answer.read().decode()
    value = text.partition("<userData>")[2].partition("<value>")[2].partition("</value>")[0]
    return base64.b64decode(value).decode()


def _serve(server: str, directory: str, instance: str, another_key: str = "") -> None:
    config = json.loads(_user_data(server, instance).removeprefix("#cloud-config\n"))
    root = Path(directory, instance)
    root.mkdir(exist_ok=True)
    mine = root / str(os.getpid())
    mine.touch(mode=0o600)
    key = Path(another_key).read_text() if another_key else config["ssh_keys"]["ed25519_private"]
    mine.write_text(key)
    mine.rename(root / "host_key")
    (root / "authorized_keys").write_text("\n".join(config["users"][1]["ssh_authorized_keys"]))
    (root / "sshd_config").write_text(_SSHD.format(root=root))
    os.execv(SSHD, [SSHD, "-i", "-f", str(root / "sshd_config")])


if __name__ == "__main__":
    _serve(*sys.argv[1:])
