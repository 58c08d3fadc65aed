"""The report's page without a browser: numbers, escaping, no external resources, and pages with missing parts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from markupsafe import escape

from accept_head.inference.report.data import CalibrationCurve, ViewedResponse, ViewedRound, ViewedToken, printable
from accept_head.inference.report.formats import interval, per_cent
from accept_head.inference.report.page import headline, render_page, write_report
from accept_head.inference.report.plots import draw_plots
from accept_head.inference.report.svg import PALETTE
from tests.inference.support.report_sample import sample_report

NASTY = (
    "</script><script>alert(1)</script> \"quoted\" 'single' & <img src=x onerror=alert(2)> $x_1$ {{data}} \ud800 \x00"
)


class Page(HTMLParser):
    """What a page holds: tags with their attributes, the cells of each table by the label of its box, its text."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.scripts: list[str] = []
        self.label = ""
        self.feed(text)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "div" and dict(attributes).get("class") == "scroll":
            self.label = dict(attributes)["aria-label"]
            while self.label in self.tables:
                self.label += "+"
            self.tables[self.label] = []
        if tag == "tr":
            self.tables[self.label].append([])
        if tag in ("td", "th"):
            self.tables[self.label][-1].append("")
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" in self.open:
            self.scripts[-1] += data
        elif {"td", "th"} & set(self.open):
            self.tables[self.label][-1][-1] += ("|" if self.tables[self.label][-1][-1] else "") + data


@pytest.fixture(scope="module")
def data():
    return sample_report()


@pytest.fixture(scope="module")
def written(data, tmp_path_factory):
    return write_report(data, tmp_path_factory.mktemp("report") / "out.html")


@pytest.fixture(scope="module")
def source(written):
    return written[0].read_text(encoding="utf-8")


def outside(source):
    """Whatever could make a browser fetch something: any URL with a host, any reference but # and data:."""
    found = re.findall(r"(?:https?:|wss?:|ftp:)?//[\w.-]+\.\w+", source)
    for tag, attributes in Page(source).tags:
        for name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data"):
            if (value := attributes.get(name)) is not None and not value.startswith(("#", "data:")):
                found.append(f"{tag} {name}={value}")
    return found + re.findall(r"@import[^;]*|url\((?!#)[^)]*\)", source)


def test_writes_the_page_and_its_plots_and_leaves_nothing_else(written):
    names = ["out.html", *(f"out.{name}.png" for name in ("pareto", "throughput", "calibration", "lengths", "depths"))]
    assert [path.name for path in written] == names
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(names)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[1:])
    assert written[0].stat().st_size < 3_000_000


def test_the_same_data_gives_the_same_files(data, written, tmp_path):
    assert [path.read_bytes() for path in write_report(data, tmp_path / "out.html")] == [
        path.read_bytes() for path in written
    ]


def test_the_informed_bound_has_a_row_a_column_and_a_word_in_the_headline(data, source):
    """Only where the target was asked."""
    assert "informed" not in source.lower()
    oracle = next(policy for policy in data.policies if policy.family == "oracle")
    interval = {"informed_gap_closed": (0.31, 0.45)}
    shared = [replace(p, informed_gap_closed=0.375, ci95={**p.ci95, **interval}) for p in data.policies]
    bound = replace(oracle, name="informed", family="informed", informed_gap_closed=1.0)
    told = replace(data, policies=[*shared[:-1], bound, shared[-1]])
    page = render_page(told, draw_plots(told))
    head, *rows = Page(page).tables["Main policies"]
    assert head[-1] == "informed gap closed" and all(len(row) == 9 for row in rows)
    assert [row[0].split("|")[0] for row in rows][-2:] == ["informed", "oracle"]
    assert all(row[-1].startswith("+37.5") and "31.0 to 45.0" in row[-1] for row in rows if row[0] != "informed")
    assert "37.5" in headline(told) and "37.5" not in headline(data)
    assert "informed bound" in page and "likely each token is accepted, but not whether" in page


def test_the_main_table_holds_the_numbers_of_the_data(data, source):
    head, *rows = Page(source).tables["Main policies"]
    assert len(head) == 8 and len(rows) == len(data.main)
    for policy, row in zip(data.main, rows, strict=True):
        assert row[0].split("|")[0] == policy.name
        assert ("recommended" in row[0]) == policy.chosen
        assert row[1:4] == [
            f"{policy.discard_rate:.3f}",
            f"{policy.verification_rate:.3f}",
            f"{policy.block_efficiency:.2f}",
        ]
        assert row[4:6] == [f"{policy.throughput:,.0f}", f"{policy.speedup:.3f}×"]
        assert row[6] == f"{per_cent(policy.gain_over_best_fixed)}|{interval(policy.ci95['gain_over_best_fixed'])}"
        assert row[7] == f"{per_cent(policy.oracle_gap_closed)}|{interval(policy.ci95['oracle_gap_closed'])}"
    every = Page(source).tables["All settings"][1:]
    assert sorted(row[0].split("|")[0] for row in every) == sorted(policy.name for policy in data.policies)


def test_the_headline_speaks_of_the_recommended_policy(data, source):
    chosen = data.chosen
    text = re.sub(r"<.*?>", "", headline(data)).replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert text == (
        f"On 24 prompts ({data.tokens:,} tokens), tiny-target with draft tiny-draft at 9.22 ms a verification and "
        f"1.33 ms a drafted token: {chosen.name} decodes {chosen.speedup:.3f}× as fast as the target alone and "
        f"{chosen.gain_over_best_fixed * 100:.1f} % faster than the best fixed draft length ({data.best_fixed.name}), "
        f"which closes {chosen.oracle_gap_closed * 100:.1f} % of the gap to the oracle (95 % interval "
        f"{chosen.ci95['oracle_gap_closed'][0] * 100:.1f} to {chosen.ci95['oracle_gap_closed'][1] * 100:.1f} %)."
    )
    assert headline(data) in source


def test_a_verdict_is_the_heading_and_the_one_plot_that_explains_it_follows(data, source):
    told = replace(data, verdict=("Verdict: use <head>.", "It is 12.3 % faster than the target alone."))
    page = render_page(told, draw_plots(told))
    assert "<h1>Verdict: use &lt;head&gt;.</h1>" in page and '<p class="lead">It is 12.3 % faster' in page
    assert "decodes" not in headline(told) and headline(told) in page  # one recommendation is enough
    titles = re.findall(r"<figure><h3>(.*?)</h3>", page)
    assert titles[0] == "Throughput against threshold" and sorted(titles) == sorted(
        re.findall(r"<figure><h3>(.*?)</h3>", source)
    )
    assert page.index(titles[0]) < page.index("<nav") < page.index('id="results"')


def test_the_words_of_the_table_lead_to_what_they_mean(source):
    links = re.findall(r'<a href="#(word-\d+)">(.*?)</a>', source)
    meanings = dict(re.findall(r'<dt id="(word-\d+)">(.*?)</dt>', source))
    assert len(meanings) == 8 and all(meanings[name] == word for name, word in links)
    assert {"discard rate", "block efficiency", "oracle gap closed"} <= {word for _, word in links}


def test_the_domain_table_holds_the_numbers_and_marks_the_worst(data, source):
    (_, *domains), *rows = Page(source).tables["Speed-up and gain over the best fixed K in each domain"]
    assert domains == [f"{domain}|8 prompts" for domain in ("code", "prose", "chat")]
    for policy, row in zip(data.main, rows, strict=True):
        gains = {domain: found.gain_over_best_fixed for domain, found in policy.domains.items()}
        for (domain, found), cell in zip(policy.domains.items(), row[1:], strict=True):
            worst = policy.family not in ("none", "oracle") and gains[domain] == min(gains.values())
            assert ("worst" in cell) == worst
            assert cell.startswith(f"{found.speedup:.3f}×|") and cell.endswith(per_cent(found.gain_over_best_fixed))


def test_the_viewer_gets_every_token(data, source):
    prompts = json.loads(Page(source).scripts[0])
    shown = [
        (prompt["prompt"], prompt["domain"], viewed["policy"], viewed["rounds"])
        for prompt in prompts
        for viewed in prompt["policies"]
    ]
    assert len(prompts) == 3 and len(shown) == len(data.responses)
    for (prompt, domain, policy, rounds), response in zip(shown, data.responses, strict=True):
        assert (prompt, domain, policy) == (response.prompt, response.domain, response.policy)
        for (kind, emitted, tokens), expected in zip(rounds, response.rounds, strict=True):
            assert (kind, emitted) == (expected.kind, expected.emitted)
            for (text, predicted, survival, *true, status), token in zip(tokens, expected.drafted, strict=True):
                assert (text, status) == (token.text, token.status[0])
                assert (predicted is None) == (token.predicted is None) == (survival is None)
                if predicted is not None:
                    assert predicted == pytest.approx(token.predicted, rel=1e-3)
                    assert survival == pytest.approx(token.survival, rel=1e-3)
                assert true == pytest.approx([token.acceptance, token.draft_probability, token.entropy], rel=1e-3)


def test_nothing_comes_from_outside(source):
    assert outside(source) == []


def test_the_policy_lets_only_the_pages_own_script_run(source):
    policy = next(a["content"] for tag, a in Page(source).tags if a.get("http-equiv") == "Content-Security-Policy")
    script = Page(source).scripts[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert [a.get("type") for tag, a in Page(source).tags if tag == "script"] == ["application/json", None]


def test_both_colour_schemes_colour_the_plots_too(source):
    light, dark = re.findall(r":root \{ (--paper.*?) \}", source)
    assert "@media screen and (prefers-color-scheme: dark)" in source
    for name, pair in PALETTE.items():
        assert f"--{name}: {pair[0]}" in light and f"--{name}: {pair[1]}" in dark
    plots = re.findall(r'<svg class="plot".*?</svg>', source, flags=re.S)
    assert len(plots) == 5
    for plot in plots:
        assert "var(--ink)" in plot and not re.search(r"#[0-9a-fA-F]{6}\b", plot)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first, second):
    low, high = sorted([luminance(first), luminance(second)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_the_palette_can_be_told_from_the_paper(scheme):
    colours = {name: pair[scheme] for name, pair in PALETTE.items()}
    assert len(set(PALETTE[name][0] for name in PALETTE)) == len(PALETTE), "a light colour names its variable"
    for name in ("ink", "muted", "accent"):
        assert contrast(colours[name], colours["paper"]) >= 4.5 and contrast(colours[name], colours["panel"]) >= 4.5
    for name in colours:
        if name.startswith(("fixed", "rule", "depth")):
            assert contrast(colours[name], colours["paper"]) >= 3, name


def test_ids_are_unique_and_every_plot_has_words(source):
    tags = Page(source).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = {a[k][1:] for _, a in tags for k in ("href", "xlink:href") if (a.get(k) or "").startswith("#")}
    assert references <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", source)) <= set(ids)
    for _, attributes in tags:
        if attributes.get("class") == "plot":
            assert attributes["role"] == "img" and len(attributes["aria-label"]) > 60


def nasty_report():
    data = sample_report(2)
    token = ViewedToken(
        text=NASTY,
        predicted=math.nan,
        survival=None,
        acceptance=1.0,
        draft_probability=0.5,
        entropy=0.1,
        status="rejected",
    )
    rounds = [
        ViewedRound(drafted=[token], emitted=NASTY, kind="redrawn"),
        ViewedRound(drafted=[], emitted="", kind="end"),
    ]
    policies = [
        replace(
            policy,
            name=f"_{NASTY}{policy.name}",
            family=NASTY if policy.family == "head" else policy.family,
            params={NASTY: NASTY},
            domains={NASTY: policy.domains["code"], "": policy.domains["chat"]},
        )
        for policy in data.policies
    ]
    return replace(
        data,
        title=NASTY,
        pair=(NASTY, NASTY),
        sampling={NASTY: NASTY},
        policies=policies,
        calibration=[replace(curve, head=NASTY, depth=NASTY) for curve in data.calibration],
        responses=[ViewedResponse(prompt=NASTY, domain=NASTY, policy=NASTY, rounds=rounds)],
        provenance={NASTY: NASTY},
    )


def test_text_from_models_and_users_is_only_ever_text(tmp_path):
    source = write_report(nasty_report(), tmp_path / "nasty.html")[0].read_bytes().decode("utf-8")
    page = Page(source)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in page.tags]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert f"<title>{escape(printable(NASTY))}</title>" in source
    assert "{{data}}" in source, "what looks like a place of the template stays as it was"
    (prompt,) = json.loads(page.scripts[0])
    assert prompt["prompt"] == NASTY
    assert prompt["policies"][0]["rounds"] == [
        ["redrawn", NASTY, [[NASTY, None, None, 1.0, 0.5, 0.1, "r"]]],
        ["end", "", []],
    ]


def test_only_one_policy_and_nothing_else(data, tmp_path):
    bare = replace(data, policies=[data.policies[0]], calibration=[], responses=[], provenance={}, sampling={})
    page, *plots = write_report(bare, tmp_path / "bare.html")
    source = page.read_text(encoding="utf-8")
    assert len(Page(source).tables["Main policies"]) == 2
    for absent in ('id="calibration"', 'id="rounds"', 'id="viewer"', "All settings"):
        assert absent not in source
    assert "out.throughput.png" not in [path.name for path in plots]


def test_no_policy_at_all_still_makes_a_page(data, tmp_path):
    bare = replace(data, policies=[], calibration=[], responses=[])
    assert Page(write_report(bare, tmp_path / "bare.html")[0].read_text(encoding="utf-8"))


def test_prompts_without_domains_have_no_domain_table_and_many_domains_have_several(data):
    def with_domains(names):
        values = list(data.policies[0].domains.values())
        return replace(
            data, policies=[replace(p, domains=dict(zip(names, values, strict=False))) for p in data.policies]
        )

    def tables(report):
        found = Page(render_page(report, [])).tables
        return [table for label, table in found.items() if label.startswith("Speed-up and gain")]

    assert 'id="domains"' not in render_page(with_domains([""]), []) and tables(with_domains([""])) == []
    assert [cell.split("|")[0] for cell in tables(with_domains(["", "code"]))[0][0]] == [
        "policy",
        "(none named)",
        "code",
    ]
    many = {f"d{i}": data.policies[0].domains["code"] for i in range(7)}
    assert [
        len(table[0]) for table in tables(replace(data, policies=[replace(p, domains=many) for p in data.policies]))
    ] == [6, 3]


def test_a_gap_without_a_value_is_a_dash(data, tmp_path):
    gapless = [
        replace(p, oracle_gap_closed=math.nan, ci95={"oracle_gap_closed": [math.nan, math.nan]}) for p in data.policies
    ]
    source = write_report(replace(data, policies=gapless), tmp_path / "out.html")[0].read_text(encoding="utf-8")
    assert {row[7] for row in Page(source).tables["Main policies"][1:]} == {"–"}
    assert "nan" not in headline(replace(data, policies=gapless)) and "oracle" not in headline(
        replace(data, policies=gapless)
    )


def test_two_heads_have_a_calibration_plot_each(data, tmp_path):
    curves = [replace(curve, head=head) for head in ("runs/a/head", "runs/b/head") for curve in data.calibration]
    names = [path.name for path in write_report(replace(data, calibration=curves), tmp_path / "out.html")]
    assert "out.calibration-1-runs-a-head.png" in names and "out.calibration-2-runs-b-head.png" in names


def test_equal_prompts_stay_two(data, tmp_path):
    twice = replace(data, responses=[*data.responses, *data.responses])
    source = write_report(twice, tmp_path / "out.html")[0].read_text(encoding="utf-8")
    assert len(json.loads(Page(source).scripts[0])) == 6


def test_empty_bins_and_unreached_depths_draw(data, tmp_path):
    empty = CalibrationCurve(head="h", depth="7+", count=0, predicted=[], observed=[], counts=[], ece=0.0)
    policies = [replace(p, at_risk=[0, 0], accepted=[0, 0], draft_lengths=[0]) for p in data.policies]
    assert write_report(replace(data, calibration=[empty], policies=policies), tmp_path / "out.html")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0287, "+2.9 %"), (-0.176, "−17.6 %"), (0.0, "0.0 %"), (-0.0001, "0.0 %"), (math.nan, "–"), (1.0, "+100.0 %")],
)
def test_per_cent(value, text):
    assert per_cent(value).replace("\N{NARROW NO-BREAK SPACE}", " ") == text


def test_interval_of_either_sign():
    assert interval([-0.0112, 0.126]).replace("\N{NARROW NO-BREAK SPACE}", " ") == "−1.1 to 12.6 %"
    assert interval(None) == interval([math.nan, 1.0]) == ""
