# DeepSpeed on the CPU, for tests alone: it can (over gloo), but Lightning's strategy asks for GPUs.

from contextlib import ExitStack
from unittest import mock

from lightning.pytorch.accelerators.cpu import CPUAccelerator

from drafters.training.strategies import ZeroStrategy

MODULE = "lightning.pytorch.strategies.deepspeed"


class CpuZero(ZeroStrategy):
    needs_gpu = False

    def setup_environment(self):
        with ExitStack() as stack:
            stack.enter_context(mock.patch(f"{MODULE}.CUDAAccelerator", CPUAccelerator))
            stack.enter_context(mock.patch(f"{MODULE}._validate_device_index_selection"))
            super().setup_environment()

    def _setup_model_and_optimizer(self, *args, **options):
        import deepspeed

        initialize = deepspeed.initialize

        def placed(args, **given):
            args.device_rank = self.local_rank
            return initialize(args=args, **given)

        with mock.patch("deepspeed.initialize", placed):
            return super()._setup_model_and_optimizer(*args, **options)
