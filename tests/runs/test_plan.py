"""`umad plan`: counts and formulas against models that are really built, and what the command says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import tiny_folder

from umad.cli import main
from umad.config import Recipe
from umad.recipe_io import load_recipe, parse_recipe
from umad.records import UserError
from umad.runs.plan import Options, plan, seats_of
from umad.runs.planning import generating, memory
from umad.runs.planning.machines import GB, GPUS, Layout, find_gpu, read_accelerate
from umad.runs.planning.seats import Seat
from umad.runs.planning.shapes import shape_of
from umad.runs.planning.work import Assumptions, attention_flops, forward_flops, update_flops, without_signal

ROOT = Path(__file__).parent.parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
QWEN_3B = "Qwen/Qwen2.5-3B-Instruct"


def recipe_of(*overrides: str, model: str = QWEN_3B, agents: int = 1) -> Recipe:
    names = "".join(f"  - {{name: a{i}, model: '{model}'}}\n" for i in range(agents))
    text = f"""
name: planned
agents:
{names}
debate: {{protocol: mad, turns: 2}}
sampling: {{max_tokens: 512, max_prompt_tokens: 1536}}
training: {{steps: 1, problems_per_step: 16, group_size: 4, micro_batch_tokens: 8192}}
engine: {{max_batch: 16}}
data: {{train: {{name: arithmetic}}}}
evaluation: {{after: false}}
"""
    return parse_recipe(text, overrides=overrides)


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parameters"),
    [  # as their makers publish them
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096),
        ("wheel:smollm2", 134_515_008),
    ],
)
def test_parameters_are_counted_exactly(model: str, parameters: int) -> None:
    assert shape_of(model).parameters == parameters


def test_parameters_of_a_dense_qwen2_by_hand() -> None:
    hidden, layers, intermediate, narrow, vocabulary = 2048, 36, 11008, 2 * 128, 151936
    attention = 2 * hidden * hidden + hidden + 2 * (hidden * narrow + narrow)  # o has no bias
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    assert shape_of(QWEN_3B).parameters == layers * layer + vocabulary * hidden + hidden


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_folder_counts_as_the_model_that_is_built_from_it(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_folder(tmp_path / kind, kind)
    model = AutoModelForCausalLM.from_pretrained(folder)
    shape = shape_of(str(folder))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.tied
    assert shape.head_parameters == model.get_output_embeddings().weight.numel()
    assert shape.qk_norm == (kind == "qwen3")


def test_no_weights_are_needed(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "whole")
    alone = tmp_path / "config"
    alone.mkdir()
    (alone / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert shape_of(str(alone)).parameters == shape_of(str(folder)).parameters


def test_an_adapter_has_rank_times_both_sides_of_every_layer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder = tiny_folder(tmp_path / "m")
    for targets in ("all-linear", ["q_proj", "v_proj"]):
        settings = peft.LoraConfig(r=3, target_modules=targets, task_type="CAUSAL_LM")
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), settings)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        wanted = targets if isinstance(targets, str) else tuple(targets)
        assert shape_of(str(folder)).adapter_parameters(3, wanted) == trained


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("./nowhere", "does not exist"),
        ("tiny:gpt", "tiny agents are"),
        ("wheel:other", "does not exist"),
    ],
)
def test_models_that_cannot_be_planned(model: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        shape_of(model)


def test_a_hub_name_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to the Hub")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(UserError, match=r"config\.json alone into a folder"):
        shape_of("somebody/unknown-model")


# --- memory -----------------------------------------------------------------------------------------------------------


def seat(recipe: Recipe, layout: Layout = Layout(), **assumed: Any) -> Seat:
    assumptions = Assumptions(**({"mean_length": recipe.sampling.max_tokens} | assumed))
    return seats_of(recipe, assumptions, layout)[0]


def test_what_stays_in_one_process() -> None:
    recipe = recipe_of("training.precision=bfloat16", "engine.dtype=bfloat16", "loss.kl.coef=0.001")
    p, shape = shape_of(QWEN_3B).parameters, shape_of(QWEN_3B)
    found = memory.resident(seat(recipe), recipe, Layout())
    assert found["weights"] == 4 * p
    assert found["optimiser"] == 8 * p
    assert found["engine"] == 2 * p
    # linear layers in bfloat16, embedding (and the head that is tied to it), norms and biases in float32
    assert found["reference"] == 2 * shape.linear_parameters + 4 * (p - shape.linear_parameters)
    assert "reference" not in memory.resident(seat(recipe_of()), recipe_of(), Layout())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_divides_what_it_must(zero: int) -> None:
    recipe = recipe_of("training.precision=bfloat16")
    layout = Layout(8, zero)
    p = shape_of(QWEN_3B).parameters
    found = memory.resident(seat(recipe, layout), recipe, layout)
    assert found["master weights"] == 4 * p / 8
    assert found["optimiser"] == 8 * p / 8
    assert found["weights"] == (2 * p / 8 if zero == 3 else 2 * p)
    assert found["engine"] == 4 * p  # every GPU generates with a whole copy
    kept, added = found.get("gradients", 0), memory.gradient_bytes(seat(recipe, layout), layout, "bfloat16")
    bucket = 2 * memory.BUCKET  # of bfloat16 ones
    assert (kept, added) == {1: (4 * p, 2 * p), 2: (0, 4 * p / 8 + bucket), 3: (4 * p / 8, 0)}[zero]


def test_offloading_takes_away_what_it_says() -> None:
    recipe = recipe_of("training.precision=bfloat16")
    found = memory.resident(seat(recipe), recipe, Layout(8, 3, "optimizer"))
    assert set(found) == {"weights", "gradient bucket", "engine"}
    assert set(memory.resident(seat(recipe), recipe, Layout(8, 3, "all"))) == {"gradient bucket", "engine"}


def test_idle_optimisers_leave_the_gpu() -> None:
    found = {}
    for offload in ("false", "true"):
        recipe = recipe_of(f"training.offload_idle={offload}", agents=2)
        seats = seats_of(recipe, Assumptions(mean_length=256), Layout())
        found[offload] = memory.phases(seats, recipe, Layout())
    p = shape_of(QWEN_3B).parameters
    assert found["false"]["generation"].total - found["true"]["generation"].total == pytest.approx(2 * 8 * p)
    assert found["false"]["update"].total - found["true"]["update"].total == pytest.approx(8 * p)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_base_counts_once(dtype: str) -> None:
    overrides = [f"agents.{i}.{key}" for i in (0, 1) for key in ("base=shared", "adapter.rank=8")]
    recipe = recipe_of(*overrides, "training.precision=bfloat16", f"engine.dtype={dtype}", agents=2)
    seats = seats_of(recipe, Assumptions(mean_length=256), Layout())
    first, second = memory.stay(seats, recipe, Layout()).values()
    base, adapter, size = shape_of(QWEN_3B).parameters, seats[0].trained, 2 if dtype == "bfloat16" else 4
    assert first["weights"] == 2 * base + 4 * adapter
    assert second["weights"] == 4 * adapter
    assert first["optimiser"] == second["optimiser"] == 8 * adapter
    # the engine uses the trainer's base where it has the same type
    assert first["engine"] == (0 if dtype == "bfloat16" else 4 * base) + size * adapter
    assert second["engine"] == size * adapter


def test_the_key_value_cache_is_the_engines() -> None:
    """The cache of the engine itself, grown token by token from a prompt to its longest response."""
    from umad.engines.kv import KVRows

    cache = KVRows(1, 8)
    keys = torch.zeros(2, 1, 100, 4)
    prefix = type("Prefix", (), {"layers": [type("Layer", (), {"keys": keys, "values": keys})]})
    cache.append(prefix, None, 2, 100)  # type: ignore[arg-type]
    for length in range(100, 700):
        cache.begin_step(torch.tensor([length, length]), length + 1, True)
    assert cache.layers[0].keys.shape[2] == generating.kv_columns(100, 600)


def live_tensors(known: Any) -> Any:
    """The counter of tensors' bytes that scripts/gpu_check.py measures with."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.live_tensors(known)


def planned_model(tmp_path: Path, kind: str) -> tuple[Path, Any]:
    """A model in which activations, weights and head all matter, and its folder with nothing but the config."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 3000,
        "hidden_size": 64,
        "intermediate_size": 320 if kind == "qwen2" else 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    if kind == "qwen3":
        config: Any = transformers.Qwen3Config(head_dim=16, **sizes)
    else:
        config = transformers.Qwen2Config(**sizes)
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    return tmp_path, transformers.AutoModelForCausalLM.from_config(config).float()


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_the_plan_is_what_a_real_update_takes(
    tmp_path: Path, kind: str, precision: str, checkpointing: bool, adapter: bool
) -> None:
    from umad.learning.batching import collate
    from umad.learning.head import fused_loss, scores
    from umad.learning.modeling import checkpoint_activations
    from umad.records import Sample

    folder, model = planned_model(tmp_path, kind)
    recipe = recipe_of(
        "debate.protocol=single",
        "debate.turns=1",
        "sampling.max_tokens=64",
        "sampling.max_prompt_tokens=64",
        "training.problems_per_step=2",
        "training.group_size=8",
        "training.micro_batch_tokens=1024",
        f"training.precision={precision}",
        f"training.gradient_checkpointing={str(checkpointing).lower()}",
        *(["agents.0.adapter.rank=4"] if adapter else []),
        model=str(folder),
    )
    planned = seat(recipe, problem_tokens=64)
    ids = np.ones(64, np.int32)
    sample = Sample("a0", (0, "a0", 0), ids, ids, np.zeros(64, np.float32), None, in_loss=True)
    if adapter:
        pytest.importorskip("peft")
        from umad.learning.adapters import add_adapter

        config = recipe.agents[0].adapter
        assert config is not None
        model = model.to(getattr(torch, precision))  # as a frozen base is loaded
        add_adapter(model, config, 0)
    if checkpointing:
        checkpoint_activations(model)
    model.train(checkpointing)
    trained = [p for p in model.parameters() if p.requires_grad]
    head = model.get_output_embeddings()
    live = live_tensors([*model.parameters(), *model.buffers()])

    def learn() -> None:
        batch = collate([sample] * 8, 0, "cpu")
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = fused_loss(model, head, batch, 1.0, lambda _, logprobs, __: logprobs.sum()).loss
        loss.backward()

    with live:
        learn()
        learn()  # the second micro-batch finds the first one's gradients
        optimizer = torch.optim.AdamW(trained)
        update, live.peak = live.peak, live.live
        gradients = live.live
        optimizer.step()
        optimizer.zero_grad()
        states = live.live
        live.peak = live.live
        batch = collate([sample] * 8, 0, "cpu")
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            scores(model, head, batch, 1.0)
        scoring = live.peak - live.live
    stays = memory.resident(planned, recipe, Layout())
    assert planned.trained == sum(p.numel() for p in trained)
    assert stays["weights"] == sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert gradients == memory.gradient_bytes(planned, Layout(), "float32") == 4 * planned.trained
    assert states - 4 * len(trained) == stays["optimiser"] == 8 * planned.trained  # without AdamW's counters
    found = sum(memory.update_parts(planned, recipe, Layout(), "cpu").values())
    assert found == pytest.approx(update, rel=0.08 if adapter else 0.05)
    assert sum(memory.scoring_parts(planned, recipe, Layout(), "cpu").values()) == pytest.approx(scoring, rel=0.06)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_is_what_a_real_engine_takes(tmp_path: Path, dtype: str) -> None:
    from umad.engines.base import Request
    from umad.engines.transformers import TransformersEngine
    from umad.records import Sampling

    folder, model = planned_model(tmp_path, "qwen3")
    rows, prompt, longest = 24, 40, 120
    recipe = recipe_of(
        "debate.protocol=single",
        "debate.turns=1",
        f"sampling.max_tokens={longest}",
        f"sampling.max_prompt_tokens={prompt}",
        f"training.group_size={rows}",
        "training.problems_per_step=1",
        f"engine.max_batch={rows}",
        f"engine.dtype={dtype}",
        model=str(folder),
    )
    model = model.to(getattr(torch, dtype))
    engine = TransformersEngine(model, [2999], max_batch=rows)
    ids = np.random.default_rng(0).integers(0, 2999, (rows, prompt)).astype(np.int32)
    live = live_tensors([*model.parameters(), *model.buffers()])
    with live:
        for i, row in enumerate(ids):
            engine.submit(Request((str(i), 0, 0, "a0"), Sampling(longest), i, row))  # type: ignore[arg-type]
        done = 0
        while done < rows:
            done += len(engine.pump())
    planned = [seat(recipe, problem_tokens=prompt)]
    assert sum(generating.generation_parts(planned, recipe).values()) == pytest.approx(live.peak, rel=0.08)


def test_the_largest_batches_are_the_longest_rows_and_the_first_turns() -> None:
    recipe = recipe_of("training.micro_batch_tokens=8192")
    assert recipe.training is not None
    long, short = memory.batches(seat(recipe, mean_length=512, problem_tokens=100), recipe.training, Layout())
    assert long.width == 100 + (512 + 16) + 512  # one agent's response is shown
    assert (long.tokens, long.completion) == (7 * 1140, 7 * 512)
    assert (short.width, short.tokens, short.completion) == (612, 13 * 612, 13 * 512)
    # a sample that is longer than the budget makes a batch of its own
    recipe = recipe_of("training.micro_batch_tokens=256")
    assert recipe.training is not None
    assert memory.batches(seat(recipe, problem_tokens=100), recipe.training, Layout())[0].tokens == 1140


# --- work -------------------------------------------------------------------------------------------------------------


def test_operations_follow_from_the_weights() -> None:
    shape = shape_of(QWEN_3B)
    n, v = shape.linear_parameters, shape.head_parameters
    plain = forward_flops(shape, 100, 50) - attention_flops(shape, 150)
    assert plain == 2 * n * 150 + 2 * v * 50
    assert attention_flops(shape, 10) == 2 * 36 * 16 * 128 * 100
    whole = forward_flops(shape, 100, 50)
    assert update_flops(shape, 100, 50, checkpointing=False, adapter=False) == pytest.approx(3 * whole)
    again = whole - 2 * v * 50
    assert update_flops(shape, 100, 50, checkpointing=True, adapter=False) == pytest.approx(3 * whole + again)
    assert update_flops(shape, 100, 50, checkpointing=False, adapter=True) == pytest.approx(2 * whole)


def test_groups_without_signal() -> None:
    assert without_signal(0.1, 5) == pytest.approx(0.5905)
    assert without_signal(0.9, 5) == pytest.approx(0.5905)
    assert without_signal(0.5, 5) == pytest.approx(2 / 32)
    found = plan(recipe_of("training.group_size=5"), Options(accuracy=0.25))["groups"]
    assert found["group_size"] == 5
    assert {row["accuracy"]: row["without_signal"] for row in found["table"]}[0.25] == pytest.approx(0.25**5 + 0.75**5)


def test_tokens_of_a_step() -> None:
    found = plan(recipe_of(agents=2), Options(mean_length=100, problem_tokens=50))["step"]
    responses = 16 * 4 * 2 * 2
    assert found["samples"] == responses
    assert found["tokens"]["response"] == responses * 100
    later = 50 + 2 * (100 + 16)  # a later prompt shows both agents' responses
    assert found["tokens"]["prompt"] == 16 * 4 * 2 * (50 + later)
    assert found["tokens"]["trained"] == found["tokens"]["prompt"] + found["tokens"]["response"]


def test_times_need_a_gpu_and_fall_with_more_of_them() -> None:
    recipe = recipe_of("training.precision=bfloat16", "engine.dtype=bfloat16")
    assert plan(recipe)["step"]["seconds"]["step"] is None
    one = plan(recipe, Options(gpu="H100"))["step"]["seconds"]
    eight = plan(recipe, Options(gpu="H100", gpus=8))["step"]["seconds"]
    slow = plan(recipe, Options(gpu="3090"))["step"]["seconds"]
    assert 0 < eight["update"] < one["update"] < slow["update"]
    assert one["step"] == pytest.approx(sum(one[name] for name in ("generation", "scoring", "update", "push")))


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_the_warning_comes_and_goes() -> None:
    recipe = recipe_of("training.precision=bfloat16", "engine.dtype=bfloat16", "training.micro_batch_tokens=32768")
    tight = plan(recipe, Options(gpu="A100-80"))
    assert tight["fits"] is False
    warning = next(w for w in tight["warnings"] if w["kind"] == "memory")
    assert warning["phase"] == "update"
    needed = tight["memory"]["phases"]["update"]["needed_gb"]
    assert warning["over_gb"] == pytest.approx(needed - tight["gpu"]["memory_gb"], abs=2e-3)
    assert f"{warning['over_gb']:.1f} GB more than A100-80 has" in warning["text"]
    fix = next(f for f in tight["fixes"] if f["settings"] == ("training.gradient_checkpointing=true",))
    # what is promised is what the plan says of it
    mended = plan(
        recipe_of(
            "training.precision=bfloat16",
            "engine.dtype=bfloat16",
            "training.micro_batch_tokens=32768",
            "training.gradient_checkpointing=true",
        ),
        Options(gpu="A100-80"),
    )
    assert mended["fits"] is True
    assert mended["warnings"] == [] == mended["fixes"]
    assert mended["memory"]["peak"]["needed_gb"] == pytest.approx(fix["needed_gb"], abs=2e-3)


def test_what_no_single_setting_mends_is_mended_by_several() -> None:
    recipe = load_recipe(ROOT / "recipes" / "umad_math_hetero.yaml", ["engine.max_batch=256"])
    found = plan(recipe, Options(gpu="H100"))
    assert found["fits"] is False
    assert any(len(fix["settings"]) > 1 and fix["fits"] for fix in found["fixes"])
    launch, batch = (next(s for s in found["fixes"][0]["settings"] if s.startswith(p)) for p in ("--zero", "engine."))
    zero, gpus = int(launch.split()[1]), int(launch.split()[3])
    again = plan(
        load_recipe(ROOT / "recipes" / "umad_math_hetero.yaml", [batch]), Options("H100", zero=zero, gpus=gpus)
    )
    assert again["fits"] is True


def test_memory_alone_is_enough_for_a_verdict() -> None:
    assert plan(recipe_of(), Options(gpu_memory=10))["fits"] is False
    assert plan(recipe_of(), Options(gpu_memory=1000))["fits"] is True
    assert plan(recipe_of())["fits"] is None


def test_cards_without_bfloat16_are_named() -> None:
    found = plan(recipe_of("training.precision=bfloat16", model="Qwen/Qwen2.5-0.5B"), Options(gpu="V100"))
    assert [w["kind"] for w in found["warnings"] if w["kind"] != "memory"][-1] == "precision"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options(gpu="H10"), "did you mean H100"),
        (Options(gpu="abacus"), "there are A100-40"),
        (Options(gpu_memory=-1), "no amount of memory"),
        (Options(gpus=0), "--gpus"),
        (Options(gpus=3), "15 or 18"),
        (Options(zero=4), "ZeRO stage"),
        (Options(offload="optimizer"), "only DeepSpeed offloads"),
        (Options(zero=2, offload="all"), "--zero 3 only"),
        (Options(zero=2, offload="disk"), "none, optimizer, all"),
        (Options(accuracy=1.5), "between 0 and 1"),
        (Options(mean_length=513), "sampling.max_tokens"),
        (Options(problem_tokens=0), "--problem-tokens"),
    ],
)
def test_wrong_options(options: Options, says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan(recipe_of(), options)


def test_gpus_are_found_by_what_people_call_them() -> None:
    for name in ("h100", "NVIDIA H100", "a100-80GB", "RTX 4090", "geforce rtx 3090", "Tesla T4"):
        assert find_gpu(name, None) in GPUS.values()
    h100 = find_gpu("H100", None)
    assert h100 is not None
    assert h100.memory is not None
    assert 80 * GB < h100.memory < 80 * 2**30


# --- launches ---------------------------------------------------------------------------------------------------------


def test_accelerate_configurations_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 16\n"
        "deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: none}\n"
    )
    assert read_accelerate(file) == Layout(16, 3, "optimizer")
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    assert read_accelerate(file) == Layout(4)
    assert Options(accelerate=file, gpus=8, zero=2).layout() == Layout(8, 2)
    file.write_text("distributed_type: FSDP\n")
    with pytest.raises(UserError, match="FSDP"):
        read_accelerate(file)
    with pytest.raises(UserError, match="cannot be read"):
        read_accelerate(tmp_path / "none.yaml")


@pytest.mark.parametrize("file", sorted((ROOT / "recipes" / "accelerate").glob("*.yaml")), ids=lambda f: f.stem)
def test_shipped_launches_can_be_planned(file: Path) -> None:
    found = plan(load_recipe(ROOT / "recipes" / "umad_math_hetero.yaml"), Options(accelerate=file, gpu="H100"))
    assert found["layout"]["zero"] == (int(file.stem[4]) if file.stem.startswith("zero") else 0)


def test_shared_bases_have_no_deepspeed() -> None:
    with pytest.raises(UserError, match="base: shared"):
        plan(recipe_of("agents.0.base=shared", "agents.0.adapter.rank=8"), Options(zero=2, gpus=2))


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_planned(path: Path) -> None:
    found = plan(load_recipe(path), Options(gpu="H200"))
    assert set(found) == {
        *("recipe", "gpu", "layout", "agents", "memory", "step", "groups", "assumptions", "fits", "warnings", "fixes")
    }
    json.dumps(found)  # nothing but plain values
    for phase in found["memory"]["phases"].values():
        assert phase["allocated_gb"] == pytest.approx(sum(phase["parts_gb"].values()), abs=0.01)
        assert phase["needed_gb"] > phase["allocated_gb"]
    if load_recipe(path).training is not None:
        assert found["step"]["seconds"]["step"] > 0


def test_a_recipe_without_training_plans_generation_only() -> None:
    recipe = parse_recipe("name: e\nagents: [{name: a, model: Qwen/Qwen3-8B}]\ndata: {eval: {name: math500}}\n")
    found = plan(recipe, Options(gpu="A100-40"))
    assert set(found["memory"]["phases"]) == {"generation", "idle"}
    assert found["step"] is None
    assert found["groups"] is None


def write(path: Path, recipe: Recipe) -> Path:
    from umad.recipe_io import dump_recipe

    path.write_text(dump_recipe(recipe))
    return path


def test_the_command_prints_and_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "r.yaml", recipe_of()))
    with pytest.raises(SystemExit) as end:
        main(["plan", file, "--gpu", "4090", "--accuracy", "0.8"])
    assert end.value.code == 0  # a warning is no failure
    shown = capsys.readouterr()
    for text in ("3.09B", "generation", "update", "expected share", "0.8 ", "update_mfu 35%"):
        assert text in shown.out
    assert "GB more than 4090 has" in shown.err
    with pytest.raises(SystemExit) as end:
        main(["plan", file, "--gpu", "4090", "--json"])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_the_command_refuses_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "r.yaml", recipe_of()))
    with pytest.raises(SystemExit) as end:
        main(["plan", file, "--gpu", "abacus"])
    assert end.value.code == 2
    assert "there are A100-40" in capsys.readouterr().err
