"""Packages a module with AOTInductor, loads the package and compares: `aoti_package.py op|control DEVICE PATH`.

A process of its own, since a package that does not fit its torch ends it. The control is the same without the op.
"""

from __future__ import annotations

import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from dsmoe_op import DualStreamMoE, MoEConfig

SIZES = (7, 2, 64, 1000)


def main(what: str, device: str, path: str) -> None:
    if what == "op":
        module = DualStreamMoE(MoEConfig(top_k=3), 48, 12, 32, shared_intermediate_size=80, device=device)
    else:
        module = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.ReLU()).to(device)
    x = torch.randn(7, 48, device=device)
    with torch.no_grad():
        program = torch.export.export(
            module, (x,), dynamic_shapes=({0: torch.export.Dim("T", max=4096)},), strict=False
        )
        package = torch._inductor.aoti_compile_and_package(
            program,
            package_path=path,
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # compiles sooner
        )
        packaged = torch._inductor.aoti_load_package(package)
        for T in SIZES if what == "op" else ():
            x = torch.randn(T, 48, device=device)
            assert torch.equal(packaged(x), module(x))


if __name__ == "__main__":
    main(*sys.argv[1:])
