"""No number in a README is typed by hand: each table is what the results render to."""

import json

import pytest
from workspace import PACKAGES, ROOT, get_folder, import_script

measure = import_script("measure")


def test_every_package_says_what_it_measures():
    assert set(measure.PACKAGES) == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_measured_section_is_what_the_results_render_to(package):
    text = (get_folder(package) / "README.md").read_text()
    shown = text.split(measure.BEGIN)[1].split(measure.END)[0]
    assert shown == measure.format_quoted_rows(package)
    assert shown, "the bench has not been run yet: make bench"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_readme_quotes_one_table_of_at_most_eight_rows_and_seven_columns(package):
    table = [
        line for line in measure.format_quoted_rows(package).splitlines() if line.startswith("|")
    ]
    assert len(table) <= 2 + 8
    assert table[0].count("|") <= 1 + 7


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_of_all_rows_is_what_the_results_render_to(package):
    assert (ROOT / "docs" / "results" / f"{package}.md").read_text() == measure.format_page(package)


def test_pages_quote_other_processors_only_if_there_are_no_results_with_vnni(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)

    def store(date, flags):
        facts = {"date": date, "gpus": [], "processor": "CPU", "cores": 2, "cpu_flags": flags}
        (tmp_path / date).mkdir()
        (tmp_path / date / "ddp-run.json").write_text(json.dumps({"environment": facts}))

    store("2026-01-02", ["avx2"])
    assert measure.find_newest("ddp", "run")["environment"]["date"] == "2026-01-02"
    store("2026-01-01", ["avx2", "avx512_vnni"])
    assert measure.find_newest("ddp", "run")["environment"]["date"] == "2026-01-01"
    assert len(measure.find_newest_by_machine("ddp", "run")) == 2


def test_readme_of_flashattn2_states_the_speed_on_the_newest_gpu():
    """The table has the smallest and the largest ratio of two lengths, with and without a mask."""
    times = {
        (row["seq"], row["dim"], row["causal"], row["pass"], row["impl"]): row
        for row in measure.find_newest("flashattn2", "gpu")["rows"]
        if row["case"] == "train"
    }

    def ratios(seqs, dim, which, peer, ours):
        cases = [(seq, dim, causal, which) for seq in seqs for causal in ("true", "false")]
        values = [
            times[*case, peer]["ratio_p50"]
            if ours == "ours"
            else times[*case, peer]["time_ms"] / times[*case, ours]["time_ms"]
            for case in cases
        ]
        return f"{min(values):.2f} to {max(values):.2f}"

    readme = (ROOT / "packages/flashattn2/README.md").read_text()
    columns = [
        ("forward", "sdpa flash", "ours"),
        ("forward", "sdpa cudnn", "ours"),
        ("backward", "sdpa flash", "ours"),
        ("backward", "sdpa cudnn", "ours"),
        ("backward", "sdpa cudnn", "ours atomic"),
    ]
    for dim in (64, 128):
        for seqs in ((512, 1024), (2048, 4096), (8192, 16384)):
            cells = [ratios(seqs, dim, *column) for column in columns]
            lengths = f"{seqs[0]:,} and {seqs[1]:,}"
            assert f"| {lengths} | {dim} | {' | '.join(cells)} |" in readme
