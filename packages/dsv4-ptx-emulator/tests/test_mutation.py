# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: which mutants a text has, what each line becomes, who notices them, what is written."""

from __future__ import annotations

import json
import struct
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from dsv4_ptx_emulator.cli.main import main
from dsv4_ptx_emulator.mutation.arguments import Arguments, read_arguments
from dsv4_ptx_emulator.mutation.campaign import Campaign, run
from dsv4_ptx_emulator.mutation.journal import Journal
from dsv4_ptx_emulator.mutation.mutants import mutants
from dsv4_ptx_emulator.mutation.table import markdown
from dsv4_ptx_emulator.ptx.parser import parse
from dsv4_ptx_emulator.runtime.system import System
from probe import kernel

ALL_KINDS = """
.reg .b64 %t<4>;
fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], %r2;
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
@!%p2 bra WAIT;
fence.proxy.async;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
st.release.sys.global.b64 [%d0], %d1;
ld.acquire.gpu.global.b64 %d2, [%d0];
atom.acq_rel.sys.global.add.u64 %d2, [%d0], 1;
fence.acq_rel.sys;
bar.warp.sync -1;
"""
EXPECTED = """
fence.mbarrier_init.release.cluster #1: removed
bar.sync #1: removed
mbarrier.arrive.expect_tx.shared.b64 #1: removed
mbarrier.arrive.expect_tx.shared.b64 #1: 16 bytes more
mbarrier.arrive.expect_tx.shared.b64 #1: 16 bytes fewer
mbarrier.arrive.expect_tx.shared.b64 #1: release to relaxed
mbarrier.try_wait.parity.shared.b64 #1: passes at once
mbarrier.try_wait.parity.shared.b64 #1: acquire to relaxed
fence.proxy.async #1: removed
fence.proxy.async #1: of global only
fence.proxy.async #1: of shared::cta only
cp.async.bulk.commit_group #1: removed
cp.async.bulk.wait_group #1: removed
cp.async.bulk.wait_group #1: one group less
cp.async.bulk.wait_group #1: .read only
st.release.sys.global.b64 #1: release to relaxed
st.release.sys.global.b64 #1: scope sys to gpu
ld.acquire.gpu.global.b64 #1: acquire to relaxed
ld.acquire.gpu.global.b64 #1: scope gpu to cta
atom.acq_rel.sys.global.add.u64 #1: acq_rel to relaxed
atom.acq_rel.sys.global.add.u64 #1: acq_rel to acquire
atom.acq_rel.sys.global.add.u64 #1: acq_rel to release
atom.acq_rel.sys.global.add.u64 #1: scope sys to gpu
fence.acq_rel.sys #1: removed
fence.acq_rel.sys #1: scope sys to gpu
bar.warp.sync #1: removed
"""


def test_each_synchronisation_has_its_mutants() -> None:
    text = kernel(ALL_KINDS)
    found = list(mutants(text, "probe"))
    assert [mutant.name for mutant in found] == EXPECTED.strip().split("\n")
    for mutant in found:
        changed = mutant.apply(text)
        lines, before = changed.split("\n"), text.split("\n")
        assert [place for place, line in enumerate(lines, 1) if line != before[place - 1]] == [mutant.line]
        parse(changed)


PASSING = """
ld.param.b64 %d0, [p0]; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %laneid; setp.eq.u32 %p0, %r1, 0; mov.b32 %r2, 7;
@!%p0 bra END;
setp.ne.u32 %p1, %r0, 0; @%p1 bra READER;
st.global.b32 [%d0+64], %r2;
st.release.gpu.global.b32 [%d0], %r2;
bra END;
READER:
ld.acquire.gpu.global.b32 %r3, [%d0];
setp.eq.u32 %p2, %r3, 0; @%p2 bra READER;
ld.global.b32 %r4, [%d0+64];
fence.acq_rel.gpu;
st.global.b32 [%d0+128], %r4;
END:
"""


def passing(system: System) -> None:
    """Message passing between two CTAs; the fence behind it is for nothing."""
    buffer = bytearray(256)
    address = _address(buffer)
    with system.memory.leasing([buffer], home=0):
        text = kernel(PASSING)
        system.emulator.launch(
            text, "probe", grid=(2, 1, 1), block=(32, 1, 1), parameters=struct.pack("<Q", address)
        )
        system.run()
    assert buffer[128] == 7, "the message did not come through"


def _address(buffer: bytearray) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


USELESS = ("fence.acq_rel.gpu #1: removed", "fence.acq_rel.gpu #1: scope gpu to cta")


def test_a_campaign_tells_mutants_that_are_noticed_from_those_that_are_equivalent() -> None:
    arguments = Arguments({USELESS[0]: "nothing needs it"})
    campaign = Campaign("flags", (passing,), "probe", 2, 3, 4, 1, arguments)
    result = run(campaign, "flags.json", lambda text: None)
    rows = {row["mutant"]: row for row in result["rows"]}
    status = {name: row["status"] for name, row in rows.items()}
    assert {name for name, each in status.items() if each == "caught"} == set(rows) - set(USELESS)
    assert [status[name] for name in USELESS] == ["equivalent", "survived"]
    weak = rows["st.release.gpu.global.b32 #1: release to relaxed"]
    assert weak["by"] == "memory model: relaxed"
    assert weak["runs"] == 1
    assert [check["value"] for check in result["checks"]] == [0, 0, 1, 0, 0]
    page = markdown(result, "Flags")
    assert "| memory model: scope |" in page
    assert "Nothing was found in the original." in page
    assert "`fence.acq_rel.gpu` 1, removed: nothing needs it" in page


def test_an_argument_is_about_a_mutant() -> None:
    arguments = Arguments({"fence #9: removed": "no such fence"})
    result = run(
        Campaign("flags", (passing,), "probe", 1, 1, 1, 1, arguments), "flags.json", lambda text: None
    )
    check = next(check for check in result["checks"] if check["name"] == "arguments about no mutant")
    assert check["value"] == 1
    assert not check["holds"]


def test_a_campaign_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    journal = tmp_path / "flags.json.partial"
    said: list[str] = []
    campaign = Campaign("flags", (passing,), "probe", 1, 2, 3, 1, Arguments({USELESS[0]: "nothing needs it"}))
    first = run(campaign, "flags.json", said.append, journal)
    lines = journal.read_text().split("\n")
    done = len(first["rows"])
    assert len(said) == done
    # As if it had died while it wrote down the last row but one.
    journal.write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:7])
    said.clear()
    again = run(campaign, "flags.json", said.append, journal)
    assert [text.split(" ")[0] for text in said] == [f"{done - 1}/{done}", f"{done}/{done}"]
    assert again["rows"] == first["rows"]
    # With arguments for what survived it is complete, and the journal goes.
    said.clear()
    argued = replace(campaign, arguments=Arguments(dict.fromkeys(USELESS, "nothing needs it")))
    last = run(argued, "flags.json", said.append, journal)
    assert not said
    assert all(check["holds"] for check in last["checks"])
    assert not journal.exists()


def test_a_journal_of_another_kernel_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path, {"kernel": 1}).add("row", [1])
    assert Journal(path, {"kernel": 1}).entries == {"row": [[1]]}
    assert Journal(path, {"kernel": 2}).entries == {}
    assert Journal(path, {"kernel": 1}).entries == {}


def test_findings_in_the_original_may_be_argued() -> None:
    rule = ("race", "st.shared", "both say the same")
    arguments = Arguments(findings=(rule,))
    assert arguments.of("race", "st.shared.b32 writes") == "both say the same"
    assert arguments.of("scope", "st.shared.b32 writes") == ""
    assert arguments.of("race", "ld.shared.b32 reads") == ""


def test_arguments_are_read_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "arguments.toml"
    finding = '[[finding]]\nrule = "race"\nsays = "st.shared"\nbecause = "of d"\n'
    path.write_text(
        '[[equivalent]]\nmutants = ["a #1: removed", "b #1: removed"]\nbecause = "of c"\n' + finding
    )
    mutants = {"a #1: removed": "of c", "b #1: removed": "of c"}
    assert read_arguments(path) == Arguments(mutants, (("race", "st.shared", "of d"),))
    assert read_arguments(None) == Arguments()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "flags.json"
    path = str(Path(__file__).parent)
    options = ["--path", path, "--kernel", "probe", "--name", "flags", "--output", str(output), "--jobs", "1"]
    limits = ["--seeds", "1", "--clean-seeds", "1", "--only", USELESS[0]]
    assert main(["mutate", "test_mutation:passing", *options, *limits]) == 1
    result = json.loads(output.read_text())
    assert [row["status"] for row in result["rows"]] == ["survived"]
    shown = textwrap.dedent(capsys.readouterr().out)
    assert "FAILS: mutants that nobody noticed and no argument explains = 1" in shown


def test_arguments_may_come_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign("flags", (passing,), "probe", 1, 1, 1, 1, Arguments(), frozenset(USELESS))
    result = run(campaign, "flags.json", lambda text: None)
    assert [row["status"] for row in result["rows"]] == ["survived", "survived"]
    path, arguments = tmp_path / "flags.json", tmp_path / "flags.toml"
    path.write_text(json.dumps(result))
    for argued, status, code in ((USELESS, "equivalent", 0), ([], "survived", 1)):
        arguments.write_text(
            "".join(f'[[equivalent]]\nmutants = ["{each}"]\nbecause = "x"\n' for each in argued)
        )
        assert main(["argue", str(path), "--arguments", str(tmp_path)]) == code
        assert [row["status"] for row in json.loads(path.read_text())["rows"]] == [status] * 2
    assert "FAILS: mutants that nobody noticed" in capsys.readouterr().out
