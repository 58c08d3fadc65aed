"""The report's page in a real browser: it runs without network, fits every screen, and its viewer is right."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from accept_head.inference.report.data import ViewedResponse, ViewedRound, ViewedToken
from accept_head.inference.report.page import write_report
from tests.inference.support.report_sample import sample_report

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SIZES = {"phone": (360, 740), "tablet": (768, 1024), "desktop": (1280, 900)}
NASTY = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'> & \"q\" \ud800"


@pytest.fixture(scope="module")
def browser():
    if not Path(CHROMIUM).exists():
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright; it comes with accept-head[dev]")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def data():
    return sample_report()


@pytest.fixture(scope="module")
def page_file(data, tmp_path_factory):
    return write_report(data, tmp_path_factory.mktemp("report") / "report.html")[0]


@pytest.fixture
def visit(browser):
    """Opens a file; what goes wrong gathers in page.complaints: console messages, errors, requests for other files."""
    contexts = []

    def open_page(file, *, size="desktop", scheme="light", touch=False):
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=touch, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.complaints = []
        page.on("console", lambda message: page.complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: page.complaints.append(f"error: {error}"))
        page.on("request", lambda request: _note_request(page, request.url, file))
        page.set_default_timeout(10_000)
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


def _note_request(page, url, file):
    if url != file.as_uri() and not url.startswith("data:"):
        page.complaints.append(f"request: {url}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_complaint_and_no_request_while_all_of_it_is_used(visit, page_file, scheme):
    page = visit(page_file, scheme=scheme)
    for prompt in range(3):
        page.select_option("#choose-prompt", str(prompt))
        page.select_option("#choose-policy", "1")
        page.click("#next")
    for details in page.locator("summary").all():
        details.click()
    page.locator("#text .token").first.hover()
    assert page.complaints == []


@pytest.mark.parametrize(
    ("put_in", "complaint"),
    [
        ('<img src="http://outside.invalid/a.png">', "outside.invalid"),
        ("<script>document.title = 'run'</script>", "Content Security Policy"),
        ('<img src="a.png">', "a.png"),
    ],
)
def test_a_page_that_reaches_out_or_runs_a_foreign_script_is_caught(visit, page_file, tmp_path, put_in, complaint):
    broken = tmp_path / "broken.html"
    broken.write_text(page_file.read_text(encoding="utf-8").replace("</main>", f"{put_in}</main>"), encoding="utf-8")
    page = visit(broken)
    page.wait_for_timeout(200)
    assert complaint in " ".join(page.complaints)


# Elements that stick out of the window and are not inside a box that scrolls by itself.
STICKING_OUT = """() => {
  const wide = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > window.innerWidth) found.push("the page scrolls sideways");
  for (const element of document.querySelectorAll("body *")) {
    if (element.closest(".scroll table, svg, script, [hidden]")) continue;
    const box = element.getBoundingClientRect();
    if (box.width && (box.right > wide + 0.5 || box.left < -0.5)) found.push(element.outerHTML.slice(0, 80));
  }
  return found;
}"""


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out_of_the_window(visit, page_file, size, scheme):
    page = visit(page_file, size=size, scheme=scheme)
    for details in page.locator("summary").all():
        details.click()
    for prompt in range(3):
        page.select_option("#choose-prompt", str(prompt))
        assert page.evaluate(STICKING_OUT) == []
    for table in page.locator(".scroll").all():
        assert table.evaluate("box => box.getBoundingClientRect().width <= document.documentElement.clientWidth")


def test_long_names_do_not_widen_a_phones_page(visit, data, tmp_path):
    long = "a/very/long/path/" * 8
    policies = [replace(policy, name=long + policy.name) for policy in data.policies]
    responses = [replace(data.responses[0], policy=long, prompt="x" * 500, domain=long)]
    odd = replace(data, title="t" * 90, pair=(long, long), policies=policies, responses=responses)
    page = visit(write_report(odd, tmp_path / "long.html")[0], size="phone")
    assert page.evaluate(STICKING_OUT) == []


# The least contrast of any text with what is painted behind it, and where.
CONTRAST = """() => {
  const parse = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  let worst = [21, ""];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
    if (element.closest("script, [hidden], noscript, button:disabled, option")) continue;
    const style = getComputedStyle(element);
    const front = parse(element.closest("svg") ? style.fill : style.color);
    const [low, high] = [light(front), light(behind(element))].sort((a, b) => a - b);
    const found = (high + 0.05) / (low + 0.05);
    if (found < worst[0]) worst = [found, element.outerHTML.slice(0, 120)];
  }
  return worst;
}"""
COLOURS = "() => [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"


def test_light_and_dark_differ_and_both_can_be_read(visit, page_file):
    pages = {scheme: visit(page_file, scheme=scheme) for scheme in ("light", "dark")}
    for page in pages.values():
        for prompt in range(3):
            page.select_option("#choose-prompt", str(prompt))
            worst, where = page.evaluate(CONTRAST)
            assert worst >= 4.5, where
    (light_ink, light_paper), (dark_ink, dark_paper) = (page.evaluate(COLOURS) for page in pages.values())
    assert light_ink != dark_ink and light_paper != dark_paper
    ticks = [page.locator("svg.plot text").first.evaluate("t => getComputedStyle(t).fill") for page in pages.values()]
    assert ticks[0] != ticks[1], "the plots change too"


def expected_numbers(data, response, round_, depth):
    token = data.responses[response].rounds[round_].drafted[depth]
    values = [token.predicted, token.survival, token.acceptance, token.draft_probability, token.entropy]
    return token, [*(f"{value:.4g}" for value in values), str(depth + 1), str(round_ + 1)]


def assert_tip_says(page, data, round_, depth, response=0):
    token, numbers = expected_numbers(data, response, round_, depth)
    shown = page.locator("#tip dd").all_inner_texts()
    assert [float(value) for value in shown] == pytest.approx([float(value) for value in numbers], abs=6e-4)
    assert token.status in page.locator("#tip").inner_text()
    box, (width, height) = page.locator("#tip").bounding_box(), page.viewport_size.values()
    assert box["x"] >= 0 and box["y"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= height


def places(data, response=0):
    """(round, depth) of the first token of each status, and of the last drafted one."""
    every = [(r, d) for r, round_ in enumerate(data.responses[response].rounds) for d in range(len(round_.drafted))]
    status = {(r, d): data.responses[response].rounds[r].drafted[d].status for r, d in every}
    return [*(next(place for place in every if status[place] == s) for s in set(status.values())), every[-1]]


def token_at(page, round_, depth):
    return page.locator(f'#text .token[data-round="{round_}"][data-depth="{depth}"]')


@pytest.mark.parametrize("size", list(SIZES))
def test_hovering_shows_a_tokens_numbers_inside_the_window(visit, page_file, data, size):
    page = visit(page_file, size=size)
    assert len(places(data)) == 4
    for place in places(data):
        token_at(page, *place).hover()
        assert_tip_says(page, data, *place)
    page.locator("h1").hover()
    assert page.locator("#tip").is_hidden()


def test_tapping_shows_a_tokens_numbers_and_tapping_elsewhere_hides_them(visit, page_file, data):
    page = visit(page_file, size="phone", touch=True)
    for place in places(data):
        token_at(page, *place).tap()
        assert_tip_says(page, data, *place)
    page.locator("#counts").tap()
    assert page.locator("#tip").is_hidden()


def test_the_keyboard_reaches_every_token_and_round(visit, page_file, data):
    page = visit(page_file)
    page.locator("#next").focus()
    page.keyboard.press("Tab")  # the prompt, which can be long and scrolls
    page.keyboard.press("Tab")
    assert_tip_says(page, data, 0, 0)
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    page.keyboard.press("ArrowRight")
    assert_tip_says(page, data, 0, 1)
    page.keyboard.press("ArrowDown")
    assert_tip_says(page, data, 1, 0)
    assert page.locator("#state").inner_text().startswith("Round 2 of")
    page.keyboard.press("ArrowUp")
    assert_tip_says(page, data, 0, 0)
    page.keyboard.press("End")
    assert "round" in page.locator("#tip").inner_text() and page.locator("#next").is_disabled()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_the_buttons_walk_through_the_rounds(visit, page_file, data):
    page, rounds = visit(page_file), data.responses[0].rounds
    assert page.locator("#previous").is_disabled()
    for number, round_ in enumerate(rounds):
        kept = sum(token.status == "accepted" for token in round_.drafted)
        state = page.locator("#state").inner_text()
        assert state.startswith(f"Round {number + 1} of {len(rounds)}: {len(round_.drafted)} drafted, {kept} accepted")
        current = page.locator("#text .round").evaluate_all("all => all.map(r => r.classList.contains('current'))")
        assert current == [i == number for i in range(len(rounds))]
        if number + 1 < len(rounds):
            page.click("#next")
    assert page.locator("#next").is_disabled()
    page.click("#previous")
    assert page.locator("#state").inner_text().startswith(f"Round {len(rounds) - 1} of")


def test_the_selectors_show_the_chosen_prompt_and_policy(visit, page_file, data):
    page = visit(page_file)
    prompts = list(dict.fromkeys(response.prompt for response in data.responses))
    for number, prompt in enumerate(prompts):
        page.select_option("#choose-prompt", str(number))
        mine = [response for response in data.responses if response.prompt == prompt]
        assert page.locator("#choose-policy option").all_inner_texts() == [response.policy for response in mine]
        for response in mine:
            page.select_option("#choose-policy", label=response.policy)
            assert page.locator("#prompt").inner_text() == prompt
            assert page.locator("#shown").inner_text().endswith(f"({response.domain}), policy {response.policy}")
            drafted = sum(len(round_.drafted) for round_ in response.rounds)
            assert page.locator("#text .token:not(.target)").count() == drafted
            assert f"{drafted} drafted" in page.locator("#counts").inner_text()
    page.select_option("#choose-prompt", "0")
    assert page.locator("#choose-policy option:checked").inner_text() == response.policy, "the policy stays"


def test_status_is_told_by_more_than_colour(visit, page_file):
    page = visit(page_file)
    looks = {
        status: page.locator(f"#text .{status}").first.evaluate(
            "t => { const s = getComputedStyle(t); return [s.textDecorationLine, s.fontWeight, s.fontStyle] }"
        )
        for status in ("accepted", "rejected", "discarded")
    }
    assert looks["accepted"][0] == "underline" and looks["rejected"][0] == looks["discarded"][0] == "line-through"
    assert looks["rejected"] != looks["discarded"]
    assert page.locator("#text .target").first.evaluate("t => getComputedStyle(t).borderTopStyle") != "none"


def viewed(*texts):
    tokens = [
        ViewedToken(
            text=text,
            predicted=0.5,
            survival=0.5,
            acceptance=1.0,
            draft_probability=1e-6,
            entropy=0.0,
            status="accepted",
        )
        for text in texts
    ]
    return ViewedResponse(prompt=NASTY, policy=NASTY, rounds=[ViewedRound(drafted=tokens, emitted=NASTY, kind="bonus")])


def test_text_of_a_model_is_inert(visit, data, tmp_path):
    policies = [
        replace(policy, name=f"{NASTY}{policy.name}", domains={NASTY: policy.domains["code"]})
        for policy in data.policies
    ]
    report = replace(data, title=NASTY, policies=policies, responses=[viewed(NASTY)], provenance={NASTY: NASTY})
    page = visit(write_report(report, tmp_path / "nasty.html")[0])
    page.locator("#text .token").first.hover()
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 0 and page.complaints == []
    shown = NASTY.replace("\ud800", "\N{REPLACEMENT CHARACTER}")
    assert shown in page.locator("h1").inner_text()
    assert (
        page.locator("#text .token").first.inner_text().encode("utf-16", "replace").decode("utf-16")[:-1] == NASTY[:-1]
    )


def test_what_cannot_be_seen_has_a_sign(visit, data, tmp_path):
    texts = ["\n", "  ", "\t", "", "\x07", "\u200b", "\u202e", " a", "b\nc"]
    signs = ["⏎", "··", "⇥", "∅", "␇", "⟨U+200B⟩", "⟨U+202E⟩", " a", "b⏎\nc"]
    page = visit(write_report(replace(data, responses=[viewed(*texts)]), tmp_path / "signs.html")[0])
    assert page.locator("#text .token:not(.target)").evaluate_all("all => all.map(t => t.textContent)") == signs
    assert all(box["width"] > 0 for box in (t.bounding_box() for t in page.locator("#text .token").all()))


def test_an_end_token_and_a_policy_that_predicts_nothing(visit, data, tmp_path):
    token = replace(viewed("x").rounds[0].drafted[0], predicted=None, survival=None)
    response = ViewedResponse(
        prompt="p", policy="fixed:1", rounds=[ViewedRound(drafted=[token], emitted="", kind="end")]
    )
    page = visit(write_report(replace(data, responses=[response]), tmp_path / "end.html")[0])
    page.locator("#text .accepted").hover()
    assert page.locator("#tip dd").all_inner_texts()[:4] == ["–", "–", "1.000", "1.0e-6"]
    assert "end token ended the response" in page.locator("#state").inner_text()
    assert page.locator("#counts").inner_text().startswith("1 round wrote 1 token: 1 drafted")
    assert page.complaints == []


def test_a_report_without_responses_has_no_viewer_and_no_error(visit, data, tmp_path):
    page = visit(write_report(replace(data, responses=[], calibration=[]), tmp_path / "none.html")[0])
    assert page.locator("#viewer").count() == 0 and page.complaints == []


def test_printing_shows_the_chosen_text_on_light_paper_without_controls(visit, page_file):
    page = visit(page_file, scheme="dark")
    page.select_option("#choose-prompt", "1")
    page.locator("#text .token").first.focus()
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(COLOURS)[1] == "rgb(253, 253, 252)", "paper is light whatever the screen is"
    for hidden in (".controls", "#tip", "nav"):
        assert page.locator(hidden).is_hidden()
    assert page.locator("#text").is_visible() and "(prose), policy" in page.locator("#shown").inner_text()
    page.set_viewport_size({"width": 673, "height": 1000})  # A4 less the margins
    cut = page.locator(".scroll").evaluate_all(
        "all => all.filter(b => b.offsetWidth && b.scrollWidth > b.offsetWidth + 1).length"
    )
    assert cut == 0, "a table is cut off"
    paper = page.pdf(format="A4")
    pages = len(re.findall(rb"/Type\s*/Page\b", paper))
    assert paper.startswith(b"%PDF") and 2 <= pages <= 12
