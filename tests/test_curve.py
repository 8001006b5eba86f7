# The picture of a training: rows of all csv logs of a run, each step once, and lines that say what they are.

import pytest

from drafters.training.curve import draw_curve, read_curve, save_curve

HEADER = "epoch,minutes,positions,probe/accepted_length,step,train/loss,val/accepted_length,val/accepted_length_greedy"


def write_log(run, version, *rows):
    folder = run / "logs" / f"version_{version}"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join([HEADER, *rows]) + "\n")


def trained(step):
    return f"0,,,,{step},2.5,,"


def validated(minutes, positions, step, length):
    return f"0,{minutes},{positions},,{step},,{length},{length + 0.5}"


def probed(minutes, positions, step, length):
    """A probe's row repeats the greedy number of the validation before it."""
    return f",{minutes},{positions},{length},{step},,,2.5"


@pytest.fixture
def run(tmp_path):
    """Killed after its second validation, resumed from the first; the log of a look at the finished run is empty."""
    write_log(tmp_path, 0, trained(9), validated(1, 100, 19, 1.5), probed(1, 100, 20, 1.6), trained(29))
    with (tmp_path / "logs" / "version_0" / "metrics.csv").open("a") as file:
        file.write(validated(2, 200, 39, 9.0) + "\n0,2.5,25")
    write_log(tmp_path, 2, trained(29), validated(2, 200, 39, 1.75), validated(3, 300, 59, 2.0))
    write_log(tmp_path, 10, validated(4, 400, 79, 2.25))
    (tmp_path / "logs" / "version_11").mkdir()
    return tmp_path


def test_logs_are_joined_and_each_step_counts_once(run):
    rows = read_curve(run)
    assert [row["val/accepted_length"] for row in rows if "val/accepted_length" in row] == [1.5, 1.75, 2.0, 2.25]
    assert [row["probe/accepted_length"] for row in rows if "probe/accepted_length" in row] == [1.6]
    assert [row["minutes"] for row in rows] == [1, 1, 2, 3, 4]


def test_the_picture_shows_each_number_over_minutes_and_positions(run):
    left, right = draw_curve(read_curve(run)).axes
    lines = {line.get_label(): line for line in left.get_lines()}
    assert set(lines) == {"teacher-forced, probabilistic", "teacher-forced, greedy", "real decoding"}
    assert lines["teacher-forced, greedy"].get_ydata().tolist() == [2.0, 2.25, 2.5, 2.75]
    assert lines["teacher-forced, greedy"].get_xdata().tolist() == [1, 2, 3, 4]
    assert right.get_lines()[0].get_xdata().tolist() == [100, 200, 300, 400]


def test_the_picture_is_written_where_there_is_something_to_see(run, tmp_path):
    save_curve(run)
    assert (run / "training.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "none" / "logs").mkdir(parents=True)
    write_log(tmp_path / "none", 0, trained(9))
    save_curve(tmp_path / "none")
    assert not (tmp_path / "none" / "training.png").exists()
