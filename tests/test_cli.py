import re
import subprocess

from typer.testing import CliRunner

from shardfield import cli

runner = CliRunner()


def test_help_names_the_commands():
    result = runner.invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "bench" in result.output


def test_demo_names_the_extra_that_is_missing(monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "monai" else object())
    result = runner.invoke(cli.app, ["demo"])
    assert result.exit_code == 2
    assert "the demo needs monai: pip install 'shardfield[demo]'" in re.sub(
        r"\s+", " ", result.output
    )


def test_a_failed_run_of_the_demo_fails_the_command(monkeypatch):
    from shardfield.demo import launch

    def fail(*_):
        raise subprocess.CalledProcessError(3, "torchrun")

    monkeypatch.setattr(launch, "run_demo", fail)
    result = runner.invoke(cli.app, ["demo"])
    assert result.exit_code == 3
    assert "its error stands above" in result.output
