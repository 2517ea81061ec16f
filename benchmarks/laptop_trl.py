"""TRL's side of the laptop benchmark: `GRPOTrainer` with the settings of a user who wants speed on a CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.gradients import Gradients, recorded, rollouts_of
from benchmarks.stopwatch import Stopwatch
from configs.schema import RunConfig
from pipeline.rollouts import Rollouts
from workers import verifiers
from workers.data_source import Prompt


def trainer_settings(config: RunConfig, folder: Path, *, num_steps: int) -> GRPOConfig:
    """The same iteration: no KL term, one optimizer step, no checkpointing; no work beside it (logs, files)."""
    size, rollout, optimizer = config.data.batch_size, config.rollout, config.actor.optimizer
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=size * rollout.num_samples,
        num_generations=rollout.num_samples,
        num_iterations=1,
        max_steps=num_steps,
        max_completion_length=rollout.max_new_tokens,
        generation_kwargs={"min_new_tokens": rollout.min_new_tokens},
        temperature=rollout.temperature,
        beta=0.0,
        epsilon=config.loss.clip_low,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        max_grad_norm=optimizer.max_grad_norm,
        weight_decay=optimizer.weight_decay,
        seed=config.seed,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward function of our side, called directly."""
    rows = zip(prompts, completions, answer, strict=True)
    return [verifiers.reasoning_gym(prompt, text, json.loads(entry)) for prompt, text, entry in rows]


class Rounds(TrainerCallback):  # type: ignore[misc]
    """Ends a step's time where the next one's begins, and lets `between` run in the pause."""

    def __init__(self, stopwatch: Stopwatch, between: Callable[[int, dict[str, float]], None]) -> None:
        self._stopwatch, self._between = stopwatch, between
        self._started = self._cpu_started = self._optimizer_started = self.optimizer_s = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._optimizer_started = time.perf_counter()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer_s = time.perf_counter() - self._optimizer_started

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._between(state.global_step - 1, self._seconds())
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

    def _seconds(self) -> dict[str, float]:
        total, cpu = time.perf_counter() - self._started, time.process_time() - self._cpu_started
        laps = self._stopwatch.lap()
        return {
            "generation": laps["generation"],
            "reward": laps["reward"],
            "forward and backward": laps["step"] - laps["inputs"],
            "optimizer step": laps["clip"] + self.optimizer_s,
            "total": total,
            "cpu": cpu,
        }


class TrlSide:
    """The trainer on the model at `path`; `run` makes all its steps. `first`: of its first step."""

    def __init__(self, config: RunConfig, path: str, prompts: Sequence[Prompt], folder: Path, num_steps: int) -> None:
        self.stopwatch = Stopwatch()
        self.trainer = GRPOTrainer(
            model=path,
            reward_funcs=reward,
            args=trainer_settings(config, folder, num_steps=num_steps),
            train_dataset=Dataset.from_list([{"prompt": p.text, "answer": p.answer} for p in prompts]),
        )
        self.trainer.remove_callback(PrinterCallback)
        for method, name in (
            ("_generate", "generation"),
            ("_calculate_rewards", "reward"),
            ("_prepare_inputs", "inputs"),
            ("training_step", "step"),
        ):
            self.stopwatch.watch(self.trainer, method, name)
        self.stopwatch.watch(self.trainer.accelerator, "clip_grad_norm_", "clip")

        self.first = _FirstStep(self.trainer)

    def run(self, between: Callable[[int, dict[str, float]], None]) -> None:
        """between(step, seconds by stage) is called after each step, outside of the time of any."""
        self.trainer.add_callback(Rounds(self.stopwatch, between))
        self.trainer.add_callback(self.first)
        self.trainer.train()


class _FirstStep(TrainerCallback):  # type: ignore[misc]
    """Keeps the rollouts that the first step learnt from, and its gradients. Later steps run as they are."""

    rollouts: Rollouts
    gradients: Gradients

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer, self._loss = trainer, trainer.compute_loss
        self._recording = ExitStack()
        self.gradients = self._recording.enter_context(recorded(trainer.model.named_parameters()))
        trainer.compute_loss = self._keep_inputs

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._recording.close()
        self._trainer.compute_loss = self._loss

    def _keep_inputs(self, model: Any, inputs: dict[str, Tensor], **kwargs: Any) -> Tensor:
        prompts = _token_lists(inputs["prompt_ids"], inputs["prompt_mask"])
        responses = _token_lists(inputs["completion_ids"], inputs["completion_mask"])
        self.rollouts = rollouts_of(prompts, responses, inputs["advantages"])
        loss: Tensor = self._loss(model, inputs, **kwargs)
        return loss


def _token_lists(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
