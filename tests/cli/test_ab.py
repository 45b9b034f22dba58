"""Configurations on the command line of ``dutyfree ab``."""

from __future__ import annotations

import pytest

from dutyfree.cli.ab import configuration
from dutyfree.contract.errors import UsageError


@pytest.mark.parametrize(
    ("text", "label", "options"),
    [
        ("bare", "bare", {"use": "bare"}),
        ("quick=bare", "quick", {"use": "bare"}),
        ("native:ready=0", "native:ready=0", {"use": "native", "ready": 0}),
        ("old=docker:image=my/image:1", "old", {"use": "docker", "image": "my/image:1"}),
        (
            "n=native:limits.memory=512M,limits.cpus=1.5,image=host",
            "n",
            {"use": "native", "limits": {"memory": 512 << 20, "cpus": 1.5}, "image": "host"},
        ),
        (
            'n=native:peers=["tcp://a:1","tcp://b:2"],ready=2',
            "n",
            {"use": "native", "peers": ["tcp://a:1", "tcp://b:2"], "ready": 2},
        ),
    ],
)
def test_a_configuration_is_a_label_a_substrate_and_its_options(text, label, options):
    assert configuration(text) == (label, options)


@pytest.mark.parametrize("text", ["", ":", "=bare", "bare:ready", "bare:=1", "bare:limits=1,limits.cpus=2"])
def test_what_is_none_is_refused(text):
    with pytest.raises(UsageError):
        configuration(text)


def test_a_file_says_the_same(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text('use = "native"\nready = 0\n[limits]\ncpus = 1\n')
    assert configuration(str(path)) == ("small", {"use": "native", "ready": 0, "limits": {"cpus": 1}})
    path.write_text('use = "native"\nlabel = "tiny"\n')
    assert configuration(str(path)) == ("tiny", {"use": "native"})
    for wrong in ("ready = 0", "use = 3", 'use = "bare"\nlabel = 1', "use ="):
        path.write_text(wrong)
        with pytest.raises(UsageError, match=r"small\.toml"):
            configuration(str(path))
