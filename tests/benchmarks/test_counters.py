"""What is kept of Nsight Compute's output, and to which workload a launch belongs."""

from pathlib import Path

from tests.benchmarks.conftest import Program

SAID = """\
==PROF== Connected to process 1
"ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"
"0","at::spin_kernel(long)","(1, 1, 1)","(1, 1, 1)","Duration","ns","2,100"
"1","logits","(128, 1, 1)","(528, 1, 1)","Duration","ns","14,336"
"1","logits","(128, 1, 1)","(528, 1, 1)","Stall Barrier","inst","1.17"
"1","logits","(128, 1, 1)","(528, 1, 1)","Stall Misc","inst","0.01"
"1","logits","(128, 1, 1)","(528, 1, 1)","L2 Persisting Size","byte","9"
"2","topk","(256, 1, 1)","(64, 1, 1)","Duration","ns","9,568"
"3","at::spin_kernel(long)","(1, 1, 1)","(1, 1, 1)","Duration","ns","2,000"
"4","logits","(128, 1, 1)","(528, 1, 1)","Duration","ns","22,944"
"""


def test_launches_belong_to_the_workload_before_them(program: Program, tmp_path: Path) -> None:
    log = tmp_path / "ncu.csv"
    log.write_text(SAID)
    first, second, third = program("counters").parse(log, ["short", "long"])
    assert (first["workload"], first["kernel"]) == ("short", "logits")
    assert first["counters"] == {"Duration, ns": 14336.0, "Stall Barrier, inst": 1.17}
    assert (second["workload"], second["kernel"]) == ("short", "topk")
    assert (third["workload"], third["counters"]) == ("long", {"Duration, ns": 22944.0})
