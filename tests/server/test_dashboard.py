"""The dashboard in a real browser, on a real server, also from an attacker's side."""

from __future__ import annotations

import base64
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dutyfree.server.tokens import Tokens
from tests.chromium import MARKS, PATIENCE, launched
from tests.server.test_http import Client
from tests.server.test_restart import Server
from tests.serving import serving

pytestmark = [*MARKS, pytest.mark.native]

ATTACK = "<img src=x onerror=\"window.hacked='{}'\"><script>window.hacked='{}'</script>\"'`${{1}}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as running:
        yield running


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture
def client(url: str) -> Client:
    return Client(url)


@pytest.fixture
def sandbox(client: Client) -> Iterator[str]:
    made = client("POST", "/v1/sandboxes", {})[1]["id"]
    yield made
    client("DELETE", f"/v1/sandboxes/{made}")


class Tab:
    """A page, and all that it logged, asked for, and was refused."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.messages: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", lambda socket: self.requests.append(socket.url))

    def link(self, sandbox: str) -> Any:
        return self.page.locator(f"td a[href='#/sandbox/{sandbox}']")

    def exec(self, client: Client, sandbox: str, command: str) -> None:
        assert client("POST", f"/v1/sandboxes/{sandbox}/exec", {"command": command})[0] == 200


@contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Tab]:
    context = browser.new_context(**options)
    tab = Tab(context.new_page())
    tab.page.goto(address)
    yield tab
    context.close()


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    return expect(locator)


def test_it_loads_without_a_complaint_and_asks_no_one_else(browser: Any, url: str, sandbox: str) -> None:
    with opened(browser, url) as tab:
        expect(tab.link(sandbox)).to_be_visible()
        expect(tab.page.locator("#status-text")).to_have_text("live")
        assert tab.messages == []
        assert [one for one in tab.requests if not one.startswith(f"{url}/")] == []


def test_headers(client: Client) -> None:
    import http.client

    connection = http.client.HTTPConnection(client.address, timeout=60)
    tags = {}
    for path in ("/", "/dashboard/main.js", "/dashboard/style.css", "/dashboard/none"):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.read()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        tags[path] = answer.headers["etag"]
    connection.request("GET", "/", headers={"If-None-Match": tags["/"]})
    assert connection.getresponse().status == 304
    connection.close()


@pytest.mark.parametrize("name", ["../pages.py", "..%2fpages.py", "__init__.py", "%2e%2e/__init__.py"])
def test_other_files_are_not_served(client: Client, name: str) -> None:
    assert client.raw("GET", f"/dashboard/{name}")[0] == 404


def test_sandboxes_come_and_go(browser: Any, url: str, client: Client) -> None:
    with opened(browser, url) as tab:
        made = client("POST", "/v1/sandboxes", {"labels": {"name": "first"}})[1]["id"]
        expect(tab.link(made)).to_be_visible()
        tab.exec(client, made, "echo seen")
        row = tab.page.locator("tr", has=tab.link(made))
        expect(row).to_contain_text("echo seen")
        expect(row).to_contain_text("first")
        client("POST", f"/v1/sandboxes/{made}/pause")
        expect(row).to_contain_text("paused")
        client("DELETE", f"/v1/sandboxes/{made}")
        expect(tab.link(made)).to_have_count(0)
        figures = tab.page.get_by_label("Key figures")
        expect(figures).to_contain_text("Live sandboxes")
        expect(figures).to_contain_text("compared with cold starts")


def test_failures_have_a_cause_and_leases_an_end(browser: Any, url: str, client: Client) -> None:
    with opened(browser, url) as tab:
        made = client("POST", "/v1/sandboxes", {"lease": 8})[1]["id"]
        client("GET", f"/v1/sandboxes/{made}/files?path=none")
        ending = tab.page.get_by_role("region", name="Leases about to end")
        expect(ending.locator(f"a[href='#/sandbox/{made}']")).to_be_visible()
        client("POST", "/v1/sandboxes", {"image": "/etc"})
        failures = tab.page.get_by_role("region", name="Failures by cause")
        expect(failures).to_contain_text("none: No such file or directory")
        expect(failures).to_contain_text("would be a file of the server's host")
        expect(tab.link(made)).to_have_count(0)
        expect(ending).to_contain_text("None within")


def test_the_filter(browser: Any, url: str, client: Client) -> None:
    one, other = (
        client("POST", "/v1/sandboxes", {"labels": {"name": name}})[1]["id"] for name in ("alpha", "beta")
    )
    with opened(browser, url) as tab:
        tab.page.get_by_label("Filter the sandboxes").fill("ALPHA")
        expect(tab.link(other)).to_have_count(0)
        expect(tab.link(one)).to_be_visible()
    for made in (one, other):
        client("DELETE", f"/v1/sandboxes/{made}")


def test_a_timeline(browser: Any, url: str, client: Client, sandbox: str) -> None:
    with opened(browser, url) as tab:
        tab.exec(client, sandbox, "echo one")
        tab.exec(client, sandbox, "sleep 0.2; exit 7")
        tab.link(sandbox).click()
        actions = tab.page.get_by_role("region", name="Actions, scrollable")
        expect(actions.locator("tr", has_text="echo one")).to_contain_text("exit 0")
        expect(actions.locator("tr", has_text="sleep 0.2")).to_contain_text("exit 7")
        chart = tab.page.get_by_role("img", name=re.compile("Timeline of"))
        assert chart.locator("rect").count() >= 2
        assert chart.locator("rect.failed").count() == 1
        assert tab.page.locator(".phases .phase-run").count() >= 2
        assert tab.messages == []
        tab.page.get_by_role("button", name="Keep for 10 min").click()
        expect(tab.page.get_by_role("region", name="About")).to_contain_text(re.compile(r"in (9|10) min"))
        tab.page.on("dialog", lambda dialog: dialog.accept())
        tab.page.get_by_role("button", name="End sandbox").click()
        expect(tab.page.locator(".head")).to_contain_text("ended")
        expect(tab.page.get_by_role("region", name="Terminal", exact=True)).to_contain_text("has ended")


def test_a_group_side_by_side(browser: Any, url: str, client: Client, sandbox: str) -> None:
    copies = client("POST", f"/v1/sandboxes/{sandbox}/fork", {"key": "group", "count": 3, "lease": 600})[1]
    ids = [one["id"] for one in copies]
    with opened(browser, url) as tab:
        for number, member in enumerate(ids):
            for step in range(number + 1):
                tab.exec(client, member, f"echo member {number} step {step}")
        groups = tab.page.get_by_role("region", name="Groups")
        expect(groups).to_contain_text("3 members, 6 actions")
        groups.get_by_role("link").click()
        expect(tab.page.locator(".lanes a")).to_have_count(3)
        lane = tab.page.get_by_role("img", name=re.compile(": 3 actions, 0 failed"))
        expect(lane).to_have_count(1)
        steps = tab.page.locator(".steps")
        expect(steps).to_contain_text("echo member 2 step 2")
        assert [row.locator("td").count() for row in steps.locator("tbody tr").all()] == [4, 4, 4]
        client("DELETE", f"/v1/sandboxes/{ids[0]}")
        expect(tab.page.locator(".head")).to_contain_text("3 members, 2 live")
    for member in ids[1:]:
        client("DELETE", f"/v1/sandboxes/{member}")


@contextmanager
def in_terminal(browser: Any, address: str, **options: Any) -> Iterator[tuple[Tab, Any]]:
    with opened(browser, address, **options) as tab:
        tab.page.get_by_role("button", name="Open a terminal").click()
        expect(tab.page.get_by_text("connected", exact=True)).to_be_visible()
        yield tab, tab.page.get_by_role("log", name="Terminal output")


def test_a_terminal(browser: Any, url: str, sandbox: str) -> None:
    with in_terminal(browser, f"{url}/#/sandbox/{sandbox}") as (tab, output):
        keyboard = tab.page.keyboard
        keyboard.type("echo $((6 * 7))-seen; tput cols 2>/dev/null; stty size\n")
        expect(output).to_contain_text("42-seen")
        rows, columns = tab.page.evaluate(
            "() => [document.querySelectorAll('.terminal pre > div').length, "
            "document.querySelector('.terminal .view').clientWidth]"
        )
        expect(output.locator("div", has_text=re.compile(rf"^{rows} \d\d"))).to_be_visible()
        assert columns > 300
        keyboard.type("printf '\\033[31mred\\033[0m \\342\\234\\223\\n'; cat\n")
        red = output.locator("span", has_text=re.compile("^red$"))
        expect(red).to_have_css("color", "rgb(240, 113, 107)")
        expect(output).to_contain_text("red ✓")
        keyboard.type("typed")
        expect(output).to_contain_text("typed")
        keyboard.press("Control+c")
        keyboard.type("seq 500; echo end\n")
        expect(output).to_contain_text("500end")
        expect(output.locator("div", has_text=re.compile("^17$"))).to_have_count(1)  # above the screen
        keyboard.press("Control+]")
        assert tab.page.evaluate("document.activeElement.textContent") == "Terminal"
        tab.page.get_by_label(re.compile("Terminal input")).focus()
        keyboard.type("exit 5\n")
        expect(tab.page.get_by_text("ended with exit code 5")).to_be_visible()
        tab.page.get_by_role("button", name="Open again").click()
        expect(tab.page.get_by_text("connected", exact=True)).to_be_visible()
        tab.page.evaluate("location.hash = '#/'")
        expect(tab.page.locator(".terminal")).to_have_count(0)
        assert tab.messages == []


def test_tokens(browser: Any, tmp_path: Path) -> None:
    with Tokens(tmp_path / "server.sqlite") as tokens:
        ours, operator = tokens.create("ours"), tokens.create("operator")
    with serving(tmp_path) as url:
        client = Client(url, ours)
        made = client("POST", "/v1/sandboxes", {})[1]["id"]
        with opened(browser, f"{url}/#/sandbox/{made}") as tab:
            field = tab.page.get_by_label("Token")
            field.fill("dutyfree_wrong")
            tab.page.get_by_role("button", name="Sign in").click()
            expect(tab.page.get_by_text("this token is not valid")).to_be_visible()
            field.fill(ours)
            field.press("Enter")
            tab.page.get_by_role("button", name="Open a terminal").click()
            expect(tab.page.get_by_text("connected", exact=True)).to_be_visible()
            tab.page.keyboard.type("echo to$((1))ken\n")
            expect(tab.page.get_by_role("log")).to_contain_text("to1ken")
            assert [one for one in tab.requests if ours in one] == []  # addresses are logged in many places
            assert tab.page.evaluate("localStorage.length + document.cookie.length") == 0
            tab.page.get_by_role("button", name="Sign out").click()
            expect(tab.page.get_by_label("Token")).to_be_visible()
            assert tab.page.evaluate("sessionStorage.length") == 0
            tab.page.get_by_label("Token").fill(operator)
            tab.page.keyboard.press("Enter")
            expect(tab.page.locator("#server")).to_contain_text("all tenants")
            expect(tab.page.get_by_text("Only ours may open a terminal")).to_be_visible()
            expect(tab.page.get_by_role("button", name="End sandbox")).to_be_hidden()


def test_a_stream_that_breaks_goes_on(browser: Any, url: str, client: Client) -> None:
    with opened(browser, url) as tab:
        expect(tab.page.locator("#status-text")).to_have_text("live")
        tab.page.route("**/v1/events*", lambda route: route.abort())
        tab.page.reload()
        expect(tab.page.locator("#status-text")).to_contain_text("offline")
        made = client("POST", "/v1/sandboxes", {})[1]["id"]
        tab.page.unroute("**/v1/events*")
        expect(tab.link(made)).to_be_visible()
        expect(tab.page.locator("#status-text")).to_have_text("live")
        client("DELETE", f"/v1/sandboxes/{made}")


def test_it_goes_on_with_the_next_server(browser: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server, url = Server(tmp_path), f"http://127.0.0.1:{port}"
    server.address = f"127.0.0.1:{port}"
    server.start()
    try:
        client = Client(url)
        kept, gone = (client("POST", "/v1/sandboxes", {"lease": 600})[1]["id"] for _ in range(2))
        with opened(browser, url) as tab:
            tab.exec(client, kept, "echo before")
            expect(tab.page.locator("tr", has=tab.link(kept))).to_contain_text("echo before")
            server.kill()
            expect(tab.page.locator("#status-text")).to_contain_text("offline")
            server.start()
            client("DELETE", f"/v1/sandboxes/{gone}")
            expect(tab.page.locator("#status-text")).to_have_text("live")
            expect(tab.link(gone)).to_have_count(0)
            expect(tab.page.locator("tr", has=tab.link(kept))).to_contain_text("echo before")
            expect(tab.page.locator("#server")).to_contain_text("started again")
    finally:
        server.kill(signal.SIGINT)


# --- Looks ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded(url: str) -> Iterator[tuple[str, str]]:
    """A sandbox and a group with long names and commands."""
    client, long = Client(url), "a-name-without-a-place-to-break-it-" * 4
    made = client("POST", "/v1/sandboxes", {"labels": {"name": long, long[:60]: long}, "lease": 3600})[1][
        "id"
    ]
    copies = client("POST", f"/v1/sandboxes/{made}/fork", {"key": "crowd", "count": 3, "lease": 3600})[1]
    for one in (made, *(copy["id"] for copy in copies)):
        client("POST", f"/v1/sandboxes/{one}/exec", {"command": f"echo {long * 3}; false"})
        client("GET", f"/v1/sandboxes/{one}/files?path={long}")
    yield made, copies[0]["id"]
    for one in (made, *(copy["id"] for copy in copies)):
        client("DELETE", f"/v1/sandboxes/{one}")


WIDE = """() => [...document.querySelectorAll("body *")]
    .filter(one => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".scroll"))
    .map(one => `${one.tagName} ${one.className}: ${one.textContent.slice(0, 40)}`)"""
"""What is too wide."""


def addresses(url: str, crowded: tuple[str, str]) -> list[str]:
    return [url, f"{url}/#/sandbox/{crowded[0]}", f"{url}/#/group/{crowded[1]}"]


@pytest.mark.parametrize("width", [320, 390, 768, 1400])
def test_nothing_is_wider_than_the_screen(
    browser: Any, url: str, crowded: tuple[str, str], width: int
) -> None:
    for address in addresses(url, crowded):
        with opened(browser, address, viewport={"width": width, "height": 800}) as tab:
            expect(tab.page.locator("#server")).to_contain_text("up")
            tab.page.wait_for_selector("tbody td")
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, tab.page.evaluate(WIDE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_accessibility(browser: Any, url: str, crowded: tuple[str, str], scheme: str, width: int) -> None:
    """Roles, names, contrast and more, as axe-core checks them."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe; see make setup")
    for address in addresses(url, crowded):
        with opened(browser, address, color_scheme=scheme, viewport={"width": width, "height": 900}) as tab:
            tab.page.wait_for_selector("tbody td")
            if "sandbox" in address:
                tab.page.get_by_role("button", name="Open a terminal").click()
                expect(tab.page.get_by_text("connected", exact=True)).to_be_visible()
            found = axe.Axe().run(tab.page)
            assert found.violations_count == 0, found.generate_report()


def test_light_and_dark(browser: Any, url: str) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        with opened(browser, url, color_scheme=scheme) as tab:
            seen[scheme] = tab.page.evaluate(paper)
            button = tab.page.get_by_role("button", name=re.compile("Theme"))
            chosen = []
            for _ in range(3):
                button.click()
                chosen.append((button.text_content(), tab.page.evaluate(paper)))
                if len(chosen) == 2:
                    tab.page.reload()
                    assert tab.page.evaluate(paper) == chosen[-1][1]  # it is remembered
            assert [name for name, _ in chosen] == ["Theme: light", "Theme: dark", "Theme: system"]
            assert chosen[0][1] != chosen[1][1]
            assert chosen[2][1] == seen[scheme]
    assert seen["light"] != seen["dark"]


def test_keyboard(browser: Any, url: str, sandbox: str) -> None:
    with opened(browser, url) as tab:
        expect(tab.link(sandbox)).to_be_visible()
        tab.page.keyboard.press("Tab")
        assert tab.page.evaluate("document.activeElement.className") == "skip"
        for _ in range(60):
            tab.page.keyboard.press("Tab")
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert tab.page.evaluate(outline) != "none"
            if tab.page.evaluate("document.activeElement.hash") == f"#/sandbox/{sandbox}":
                break
        tab.page.wait_for_timeout(1500)  # a rendering must not take the focus away
        assert tab.page.evaluate("document.activeElement.hash") == f"#/sandbox/{sandbox}"
        tab.page.keyboard.press("Enter")
        expect(tab.page.get_by_role("heading", name=sandbox)).to_be_visible()


def test_nothing_moves_for_those_who_do_not_want_it(browser: Any, url: str) -> None:
    with opened(browser, url, reduced_motion="reduce") as tab:
        tab.page.evaluate("document.getElementById('status').dataset.state = 'connecting'")
        assert tab.page.evaluate("document.getAnimations().length") == 0


# --- From the attacker's side -----------------------------------------------------------------------------


def test_markup_of_tasks_stays_text(browser: Any, url: str, client: Client) -> None:
    """Labels, commands, paths, errors, outputs, titles and addresses are written by the untrusted."""

    def attack(name: str) -> str:
        return ATTACK.format(name, name)

    labels = {"name": attack("label"), attack("key")[:80]: "x", "group": attack("group")}
    made = client("POST", "/v1/sandboxes", {"labels": labels})[1]["id"]
    client("POST", f"/v1/sandboxes/{made}/exec", {"command": ["sh", "-c", f"true # {attack('command')}"]})
    client("POST", f"/v1/sandboxes/{made}/list", {"path": attack("path")})
    client("POST", "/v1/sandboxes", {"image": f"/{attack('image')}"})
    with opened(browser, url) as tab:
        page = tab.page
        violations = "document.addEventListener('securitypolicyviolation', () => { window.violated = true; })"
        page.evaluate(f"() => {{ {violations} }}")
        expect(tab.link(made)).to_be_visible()
        expect(page.get_by_text(attack("label")[:30]).first).to_be_visible()
        page.get_by_role("region", name="Groups").get_by_role("link").first.click()
        expect(page.locator(".steps")).to_contain_text("true # <img")
        page.locator(".lanes a").first.click()
        expect(page.get_by_role("region", name="About")).to_contain_text("<img src=x")
        page.get_by_role("button", name="Open a terminal").click()
        expect(page.get_by_text("connected", exact=True)).to_be_visible()
        page.keyboard.type(
            "printf '\\033]0;<img src=x onerror=hacked()>\\007<b>bold</b><script>1</script>\\n'\n"
        )
        expect(page.get_by_role("log").locator("div", has_text=re.compile("^<b>bold</b>"))).to_be_visible()
        expect(page.get_by_text("<img src=x onerror=hacked()>").first).to_be_visible()
        page.evaluate("text => { location.hash = '#/sandbox/' + text }", attack("address"))
        expect(page.locator("h1")).to_contain_text("onerror")
        page.evaluate("() => { location.hash = '#/sandbox/%E0%A4%A' }")
        expect(page.locator("h1")).to_contain_text("%E0")
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("window.violated") is None  # there was nothing to refuse
        assert page.locator("main img, main script, main b b").count() == 0
        assert tab.messages == []
    client("DELETE", f"/v1/sandboxes/{made}")


def test_the_policy_refuses_markup_that_slips_in(browser: Any, url: str) -> None:
    with opened(browser, url) as tab:
        refused = tab.page.evaluate(
            "() => { try { document.body.innerHTML = '<img>'; return ''; } catch (e) { return e.name; } }"
        )
        assert refused == "TypeError"


def test_a_page_of_another_site_cannot_open_a_terminal(browser: Any, url: str, sandbox: str) -> None:
    with opened(browser, "about:blank") as tab:
        code = tab.page.evaluate(
            "address => new Promise(done => { const socket = new WebSocket(address, ['dutyfree.v1']); "
            "socket.onclose = event => done(event.code); socket.onopen = () => done('open'); })",
            f"{url.replace('http', 'ws')}/v1/channel",
        )
        assert code != "open"


# --- Parts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def module_page(browser: Any, url: str) -> Iterator[Any]:
    with opened(browser, url) as tab:
        yield tab.page


SCREEN = """async ([text, rows, columns]) => {
    const { Screen } = await import("/dashboard/screen.js");
    let replies = "";
    const screen = new Screen(rows, columns, { reply: one => { replies += one; } });
    for (const part of text) screen.write(new TextEncoder().encode(part));
    const lines = screen.lines.map(line => line.cells.map(cell => cell.text).join("").trimEnd());
    return [lines, [screen.row, screen.column], replies, screen.history.length];
}"""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one\r\ntwo", ["one", "two", "", ""]),
        ("a\tb\bc", ["a       c", "", "", ""]),
        ("0123456789abc", ["0123456789", "abc", "", ""]),
        ("0123456789\r\nx", ["0123456789", "x", "", ""]),  # the last column does not wrap by itself
        ("1\r\n2\r\n3\r\n4\r\n5", ["2", "3", "4", "5"]),
        ("\033[2;3Hx\033[Hy\033[3;99Hz", ["y", "  x", "         z", ""]),
        ("abc\033[2Dx\033[1Cy\033[Az", ["axcyz", "", "", ""]),
        ("abcdef\033[4G\033[K", ["abc", "", "", ""]),
        ("abcdef\033[4G\033[1K", ["    ef", "", "", ""]),
        ("a\r\nb\r\nc\033[2;1H\033[J", ["a", "", "", ""]),
        ("a\r\nb\r\nc\033[2Jx", ["", "", " x", ""]),
        ("abcdef\033[2G\033[2P", ["adef", "", "", ""]),
        ("abcdef\033[2G\033[2@", ["a  bcdef", "", "", ""]),
        ("abcdef\033[2G\033[2X", ["a  def", "", "", ""]),
        ("1\r\n2\r\n3\033[2;1H\033[L", ["1", "", "2", "3"]),
        ("1\r\n2\r\n3\033[2;1H\033[M", ["1", "3", "", ""]),
        ("1\r\n2\r\n3\r\n4\033[2;3r\033[3;1H\nx", ["1", "3", "x", "4"]),
        ("1\r\n2\r\n3\r\n4\033[2;3r\033[2;1H\033Mx", ["1", "x", "2", "4"]),
        ("a\0337\033[3;3Hb\0338c", ["ac", "", "  b", ""]),
        ("main\033[?1049h\033[Hother\033[?1049l!", ["main!", "", "", ""]),
        ("\033(0lqk\033(Bx", ["┌─┐x", "", "", ""]),
        ("漢字x", ["漢字x", "", "", ""]),
        ("e\u0301x", ["e\u0301x", "", "", ""]),
        ("\033]0;title\007a\033]2;b\033\\c\033P1$q\033\\d", ["acd", "", "", ""]),
        ("\033[?2004h\033[>4;1m\033[?25l\033=ok\033[38;5;1;48:2:1:2:3mx", ["okx", "", "", ""]),
        ("a\033[3b", ["aaaa", "", "", ""]),
        ("x\033[999999999999999999999Cy", ["x        y", "", "", ""]),
        ("\033[\030ok\033", ["ok", "", "", ""]),
        ("\033[?7l0123456789abc", ["012345678c", "", "", ""]),
        ("\033[4hab\033[Hc", ["cab", "", "", ""]),
    ],
)
def test_escape_sequences(module_page: Any, text: str, lines: list[str]) -> None:
    for whole in ([text], list(text)):  # in one piece, and character by character
        assert module_page.evaluate(SCREEN, [whole, 4, 10])[0] == lines


def test_a_terminal_answers_where_its_cursor_is(module_page: Any) -> None:
    _, cursor, replies, _ = module_page.evaluate(SCREEN, [["ab\r\nc\033[6n\033[c"], 4, 10])
    assert (cursor, replies) == ([1, 1], "\033[2;2R\033[?62;22c")


def test_hostile_output_neither_grows_without_bound_nor_fails(module_page: Any) -> None:
    parts = [
        "\033[" + "1;" * 100_000,
        "x" * 100_000,
        "\033]0;" + "t" * 100_000,
        "\n" * 10_000,
        "\033[0;0r\033[9;1r",
    ]
    lines, _, _, history = module_page.evaluate(SCREEN, [parts, 4, 10])
    assert len(lines) == 4
    assert history <= 2000


@pytest.mark.parametrize(
    "value",
    [
        [None, True, False, 0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, -1, -32, -33, -129, -40000],
        {"exit_code": 0, "seconds": 0.25, "spans": [["run", 0.0, 1.5]], "big": 2**40, "small": -(2**40)},
        {"message": "ä" * 40, "long": "x" * 70_000, "list": list(range(20))},
    ],
)
def test_msgpack_is_read_as_others_write_it(module_page: Any, value: Any) -> None:
    data = base64.b64encode(msgspec.msgpack.encode(value)).decode()
    script = """async data => {
        const { decode } = await import("/dashboard/msgpack.js");
        return decode(Uint8Array.from(atob(data), one => one.charCodeAt(0)));
    }"""
    assert module_page.evaluate(script, data) == value


def test_msgpack_is_written_as_others_read_it(module_page: Any) -> None:
    value = [
        "terminal",
        "sb-1",
        {"rows": 24, "columns": 300, "none": None, "text": "ü" * 50, "many": [1] * 20},
    ]
    script = """async value => {
        const { encode } = await import("/dashboard/msgpack.js");
        return [...encode(value)];
    }"""
    assert msgspec.msgpack.decode(bytes(module_page.evaluate(script, value))) == value
