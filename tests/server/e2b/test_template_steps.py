"""The steps of E2B templates as recipes."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dutyfree.contract.errors import RecipeError
from dutyfree.server.e2b.template_steps import TemplateStep, apply, begin, expansion, image_of, start
from dutyfree.server.e2b.template_store import TemplateRef

WORDS = some.text(some.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


def test_unchanged_steps_lead_to_the_same_recipe_and_a_nonce_to_another() -> None:
    step = TemplateStep("RUN", ("make",))
    first, again = (apply(step, begin("debian"), None, "") for _ in range(2))
    assert first == again
    assert apply(step, begin("debian"), None, "nonce").recipe != first.recipe


@given(WORDS, WORDS)
def test_commands_and_variables_reach_the_shell_as_they_are(command: str, value: str) -> None:
    state = apply(TemplateStep("ENV", ("NAME", value)), begin(None), None, "")
    ran = apply(
        TemplateStep("RUN", ('printf %s "$NAME"; : \'' + command.replace("'", "") + "'",)), state, None, ""
    )
    script = ran.recipe.stages[-1].commands[0]
    assert isinstance(script, str)
    script = script.replace("cd /home/user", "cd /")
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True)
    assert done.stdout == value.encode()


@given(WORDS)
def test_values_expand_variables_and_run_nothing(value: str) -> None:
    text = value.replace("$", "")
    script = expansion(f"${{A}}{text}$(touch /never)`touch /never`")
    done = subprocess.run(["/bin/sh", "-c", script], env={"A": "b"}, capture_output=True, check=True)
    assert done.stdout == f"b{text}$(touch /never)`touch /never`".encode()


@pytest.mark.parametrize(
    "step",
    [
        TemplateStep("MAKE", ("coffee",)),
        TemplateStep("RUN", ()),
        TemplateStep("RUN", ("true", "; exit")),
        TemplateStep("USER", ("$(id)",)),
        TemplateStep("ENV", ("NAME",)),
        TemplateStep("ENV", ("a b", "c")),
        TemplateStep("COPY", ("a", "b"), "never uploaded"),
        TemplateStep("COPY", ("a", "b", "", "rwx")),
        TemplateStep("COPY", ("../a", "b")),
        TemplateStep("COPY", ("/a", "b")),
    ],
    ids=str,
)
def test_wrong_steps_are_refused(step: TemplateStep) -> None:
    digest = None if step.files_hash else "0" * 64
    with pytest.raises(RecipeError):
        apply(step, begin(None), digest, "")


def test_the_image_of_e2b_is_the_servers_own() -> None:
    assert (
        image_of("e2bdev/base") is image_of("e2bdev/base:latest") is image_of("docker.io/e2bdev/base") is None
    )
    assert image_of("e2bdev/code-interpreter") == "e2bdev/code-interpreter"


def test_a_ready_command_that_only_sleeps_is_not_waited_for() -> None:
    (sleeping,) = start(begin(None), "server", "sleep 20").recipe.services
    (waiting,) = start(begin(None), "server", "curl localhost").recipe.services
    assert "sleep 20" not in str(sleeping.command)
    assert "curl localhost" in str(waiting.command)
    assert start(begin(None), None, None) == begin(None)


def test_references() -> None:
    assert TemplateRef.parse("team/Name:v1") == ("name", "v1")
    assert TemplateRef.parse("name") == ("name", None)
