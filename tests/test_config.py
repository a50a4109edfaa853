"""mpp/config.py: every message for what a person may get wrong, and what resolves to what."""

import dataclasses

import pytest
import yaml

from mpp import config
from mpp.errors import UserError


def refusal(path, *overrides):
    with pytest.raises(UserError) as caught:
        config.load_run(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4", "+1e-4", "1.e-4"])
def test_every_way_to_write_a_number(tiny, tmp_path, text):
    recipe, _ = config.load_run(tiny(), [f"optim.learning_rate={text}"])
    assert recipe.optim.learning_rate == 1e-4
    path = tmp_path / "resolved.yaml"
    config.save(recipe, path)
    assert yaml.safe_load(path.read_text())["optim"]["learning_rate"] == 1e-4
    in_file = tmp_path / "in_file.yaml"
    in_file.write_text(path.read_text().replace("learning_rate: 0.0001\n", f"learning_rate: {text}\n"))
    assert config.load_run(str(in_file))[0] == recipe


def test_a_saved_recipe_reads_back_as_the_same(tiny, tmp_path):
    recipe, _ = config.load_run(
        tiny(), ["optim.learning_rate=[0.01, 3e-2]", "runtime.workers=auto", "data.per_class=3"]
    )
    config.save(recipe, tmp_path / "config.yaml")
    again, defaults = config.load_run(str(tmp_path / "config.yaml"))
    assert again == recipe
    assert defaults == []


def test_defaults_are_named(tiny):
    _, defaults = config.load_run(tiny())
    assert "optim.beta2=0.999" in defaults
    assert "objective.corruption=0.5" in defaults
    assert not any(key.startswith("optim.steps") for key in defaults)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learning_rte=1e-3", "unknown key learning_rte; did you mean optim.learning_rate?"),
        ("data.learning_rate=1e-3", "unknown key data.learning_rate; did you mean optim.learning_rate?"),
        ("optim.lerning_rate=1e-3", "unknown key optim.lerning_rate; did you mean optim.learning_rate?"),
        ("optim.learning_rate=fast", "optim.learning_rate=fast: optim.learning_rate must be a number or a list"),
        ("optim.steps=1.5", "optim.steps must be a whole number, not 1.5"),
        ("optim.steps=true", "optim.steps must be a whole number, not True"),
        ("optim.steps=", "optim.steps must be a whole number, not null"),
        ("optim.clip_norm=true", "optim.clip_norm must be a number, not True"),
        ("optim.clip_norm=.inf", "optim.clip_norm must be a number, not inf"),
        ("optim.clip_norm=.nan", "optim.clip_norm must be a number, not nan"),
        ("data.flip=maybe", "data.flip must be true or false, not 'maybe'"),
        ("data.crop_area=[0.5]", "data.crop_area must be a list such as [a number, a number], not [0.5]"),
        ("objective.target=mean_colour", "objective.target must be mean_color or colors_4x4 or pixels"),
        ("runtime.workers=some", "runtime.workers must be a whole number or auto"),
        ("objective.corruption=0", "objective.corruption=0.0 must lie in (0, 1]"),
        ("objective.corruption=1.5", "objective.corruption=1.5 must lie in (0, 1]"),
        ("seed=-1", "seed=-1 must lie in 0 .. 2**32 - 1"),
        ("optim.beta2=1", "optim.beta2=1.0 must lie in [0, 1)"),
        ("optim.momentum=-1", "optim.momentum=-1.0 must lie in [0, 1)"),
        ("optim.end_learning_rate=-3", "optim.end_learning_rate=-3.0 must not be negative"),
        ("data.eval_split=train", "data.eval_split=train is the training split; held-out images must be others"),
        ("model.depth=0", "model.depth=0 must be positive, or null"),
        ("optim.steps=0", "optim.steps=0 must be positive"),
        ("optim.warmup_steps=4", "optim.warmup_steps=4 must be smaller than optim.steps=4"),
        ("runtime.save_every=5", None),
        ("optim.learning_rate=-1", "optim.learning_rate=-1.0 must be positive"),
        ("optim.learning_rate=[]", "must be positive"),
        ("data.crop=square", "data.resize=None goes with data.crop=square or short_side or data.eval_crop=center"),
        ("data.eval_crop=center", "data.resize=None goes with data.crop=square"),
        ("data.resize=64", "and only with them (here: inception, whole)"),
        ("data.crop=middle", "data.crop must be inception or square or short_side, not 'middle'"),
        ("data.on_error=skip", "data.on_error must be stop or replace, not 'skip'"),
        ("data.shuffle_shards=0", "data.shuffle_shards=0 must be positive"),
        ("data.max_broken=-1", "data.max_broken=-1 must not be negative"),
        ("runtime.cache_gb=0", "runtime.cache_gb=0.0 must be positive"),
        ("data.crop_area=[0.9, 0.5]", "data.crop_area=[0.9, 0.5] must rise within (0, 1]"),
        ("optim=3", "optim is a section; name a key in it, such as optim."),
        ("optim.steps.x=3", "steps is a value, not a section"),
        ("steps", "an override is key=value"),
        ("data.source=[", "not YAML"),
        ("data.choice_split=train", "data.choice_split=train must be neither the training split nor the test split"),
        (
            "data.choice_split=validation",
            "data.choice_split=validation must be neither the training split nor the test",
        ),
        ("data.max_overlap=-1", "data.max_overlap=-1 must not be negative"),
        ("data.max_overlap=0.5", "data.max_overlap must be a whole number, not 0.5"),
        ("data.shuffle_labels=true", "data.shuffle_labels=true: masked patch prediction reads no labels; leave it out"),
        ("optim.learning_rate=[0.1, 0.2, 0.1]", "optim.learning_rate=[0.1, 0.2, 0.1] names one twice"),
        ("runtime.tracker=mlflow", "runtime.tracker must be none or tensorboard or wandb or trackio, not 'mlflow'"),
        ("tests.test=folder:x", "tests.test: choose another name, of letters, digits, _ and -"),
        ("tests.my set=folder:x", "tests.my set: choose another name"),
        ("probe.every=-1", "probe.every=-1 must be a multiple of runtime.log_every=1"),
        ("probe.shots=[]", "probe.shots=[] must be positive numbers, each once"),
        ("probe.shots=[1, 0]", "probe.shots=[1, 0] must be positive numbers, each once"),
        ("probe.shots=[5, 5]", "probe.shots=[5, 5] must be positive numbers, each once"),
        ("probe.neighbors=[-1]", "probe.neighbors=[-1] must be positive numbers, each once"),
        ("probe.strengths=[0.1, 0.0]", "probe.strengths=[0.1, 0.0] must be positive numbers, each once"),
        ("probe.seeds=[]", "probe.seeds=[] must lie in 0 .. 2**32 - 1, each once"),
        ("probe.seeds=[-1]", "probe.seeds=[-1] must lie in 0 .. 2**32 - 1, each once"),
        ("probe.seeds=[4294967296]", "probe.seeds=[4294967296] must lie in 0 .. 2**32 - 1, each once"),
        ("probe.seeds=[3, 3]", "probe.seeds=[3, 3] must lie in 0 .. 2**32 - 1, each once"),
        ("probe.strength=0", "probe.strength=0.0 must be positive"),
        ("probe.temperature=-0.1", "probe.temperature=-0.1 must be positive"),
        ("probe.test_images=0", "probe.test_images=0 must be positive"),
        ("probe.block=0", "probe.block=0 must be positive, or null"),
        ("probe.features=both", "probe.features must be token or patches or null, not 'both'"),
        ("probe.form=white", "probe.form must be whitened or plain, not 'white'"),
    ],
)
def test_what_is_refused_and_how(tiny, override, words):
    if words is None:
        message = refusal(tiny(), override, "runtime.log_every=2")
        assert "runtime.save_every=5 must be a multiple of runtime.log_every=2" in message
    else:
        assert words in refusal(tiny(), override)


def test_probes_are_measured_with_what_is_logged(tiny):
    message = refusal(tiny(), "probe.every=3", "runtime.log_every=2", "runtime.save_every=2")
    assert message == "probe.every=3 must be a multiple of runtime.log_every=2"
    assert config.load_run(tiny(), ["probe.every=4", "runtime.log_every=2"])[0].probe.every == 4


def test_a_split_to_choose_on_goes_with_all_training_images(tiny):
    for change, words in [
        ("data.per_class=2", "data.per_class=2 draws from the training split alone"),
        ("data.subset=0.5", "data.subset=0.5 is of the training split alone"),
    ]:
        message = refusal(tiny(), "data.choice_split=val", change)
        assert words in message and "it does not go with data.choice_split=val" in message
    recipe, defaults = config.load_run(tiny(objective__name="supervised"), ["data.choice_split=val"])
    assert recipe.data.choice_split == "val" and not any(key.startswith("data.holdout") for key in defaults)


def test_labels_are_shuffled_where_there_are_some(tiny):
    shuffled = config.load_run(tiny(objective__name="supervised"), ["data.shuffle_labels=true"])[0]
    plain = config.load_run(tiny(objective__name="supervised"))[0]
    assert config.changed_keys(plain, shuffled) == ["data.shuffle_labels: False there, True here"]


def test_what_only_looks_on_may_differ(tiny):
    changes = ["probe.every=1", "probe.shots=[2]", "data.max_overlap=3", "runtime.tracker=wandb"]
    before, after = config.load_run(tiny())[0], config.load_run(tiny(), changes)[0]
    assert config.changed_keys(before, after) == [] and config.recipe_hash(before) == config.recipe_hash(after)


@pytest.mark.parametrize(
    ("text", "value"), [("false", False), ("False", False), ("0", False), ("no", False), ("true", True), ("1", True)]
)
def test_booleans(tiny, text, value):
    assert config.load_run(tiny(), [f"data.flip={text}"])[0].data.flip is value


def test_a_cut_must_fit_into_what_it_is_cut_from(tiny):
    with pytest.raises(UserError, match=r"data.resize=31 must not be smaller than data.image_size=32"):
        config.load_run(tiny(), ["data.crop=square", "data.resize=31"])
    assert config.load_run(tiny(), ["data.crop=square", "data.resize=32"])[0].data.resize == 32


def test_what_is_done_about_broken_images_may_differ(tiny):
    stops, replaces = (
        config.load_run(tiny(), changes)[0] for changes in ([], ["data.on_error=replace", "data.max_broken=3"])
    )
    assert config.changed_keys(stops, replaces) == []
    assert config.recipe_hash(stops) == config.recipe_hash(replaces)
    other = config.load_run(tiny(), ["data.flip=false"])[0]
    assert config.changed_keys(stops, other) == ["data.flip: True there, False here"]
    assert config.recipe_hash(stops) != config.recipe_hash(other)


def test_a_fault_in_a_file_names_file_and_line(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 0\ndata:\n  source: demo\n  image_siez: 32\n")
    assert f"{path}:4: unknown key data.image_siez; did you mean data.image_size?" in refusal(str(path))
    path.write_text(
        "seed: 0\ndata: {source: demo}\nmodel: {name: x}\noptim:\n  steps: 4\n  batch_size: eight\n  learning_rate: 1\n"
    )
    assert f"{path}:6: optim.batch_size must be a whole number, not 'eight'" in refusal(str(path))
    path.write_text("seed: 0\ndata: demo\n")
    assert f"{path}:2: data is a section, not a value" in refusal(str(path))
    path.write_text("")
    assert f"{path} holds no recipe" in refusal(str(path))
    path.write_bytes(b"seed: \xff\xfe\n")
    assert f"{path} can't be read" in refusal(str(path))
    for text in ("seed: \x00\n", "seed: 2024-13-45\n"):
        path.write_text(text)
        assert f"{path}: not YAML" in refusal(str(path))
    path.write_text("data:\n  source: [\n")
    assert f"{path}:3: not YAML" in refusal(str(path))


def test_a_key_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 0\noptim:\n  steps: 4\n  steps: 5\n")
    assert refusal(str(path)) == f"{path}:4: steps stands twice; remove one"


def test_a_missing_key_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("data: {source: demo}\nmodel: {name: x}\noptim: {steps: 4, batch_size: 8}\n")
    assert refusal(str(path)) == f"{path}: optim.learning_rate is missing, and has no default"


def test_unknown_recipe_lists_those_there_are():
    message = refusal("mpp_b61")
    assert "did you mean mpp_b16?" in message and "mpp_demo" in message
    assert "no such file" in refusal("nowhere/mine.yaml")


def test_changed_keys_leave_out_runtime(tiny):
    before, _ = config.load_run(tiny())
    after, _ = config.load_run(tiny(), ["runtime.micro_batch=4", "finetune=x"])
    assert config.changed_keys(before, after) == []
    assert config.recipe_hash(before) == config.recipe_hash(after)
    after, _ = config.load_run(tiny(), ["optim.steps=9", "seed=1"])
    assert config.changed_keys(before, after) == ["optim.steps: 4 there, 9 here", "seed: 0 there, 1 here"]
    assert config.recipe_hash(before) != config.recipe_hash(after)


def test_configs_are_frozen(tiny):
    recipe, _ = config.load_run(tiny())
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.seed = 1


# ---- comparisons

PLAN = {"tasks": {"crops": ["finetune_demo"]}, "seeds": [0, 1], "choice_seeds": [0], "arms": {"a": "scratch"}}


@pytest.fixture
def plan(tmp_path):
    """Writes a small comparison, with some keys changed or (None) left out, and returns its path."""

    def write(**changes):
        path = tmp_path / "mine.yaml"
        kept = {key: value for key, value in {**PLAN, **changes}.items() if value is not None}
        path.write_text(yaml.safe_dump(kept))
        return str(path)

    return write


def test_the_demos_comparison():
    found = config.load_compare("compare_demo")
    assert list(found.arms) == ["self-supervised", "supervised", "from scratch"]
    assert len(found.seeds) >= 3 and set(found.choice_seeds) <= set(found.seeds)
    with pytest.raises(UserError, match="is a comparison: eval/compare.py takes it"):
        config.load_run("compare_demo")
    with pytest.raises(UserError, match="is a run: mpp/pretrain.py or eval/finetune.py takes it"):
        config.load_compare("mpp_demo")


def test_a_comparison_reads_back_as_the_same(plan, tmp_path):
    full = {
        "tasks": {"crops": ["finetune_demo", "optim.steps=9"], "vtab/dtd": ["finetune_vtab"]},
        "arms": {"a": "scratch", "b": ["mpp_demo", "pretraining.seed=1"]},
        "baselines": ["chance", "shuffled_labels"],
        "probes": ["linear"],
        "published": {"a": 0.799},
        "published_recipes": {"a": None, "b": "mpp_b16"},
        "published_finetune": "finetune_b16",
    }
    found = config.load_compare(plan(**full), ["seeds=[4, 7]", "choice_seeds=[7]", "arms.c=runs/x", "published.a=0.5"])
    assert (found.seeds, found.choice_seeds) == ((4, 7), (7,))
    assert found.arms == {"a": "scratch", "b": ("mpp_demo", "pretraining.seed=1"), "c": "runs/x"}
    assert found.tasks == {"crops": ("finetune_demo", "optim.steps=9"), "vtab/dtd": ("finetune_vtab",)}
    assert (found.published, found.published_recipes) == ({"a": 0.5}, {"a": None, "b": "mpp_b16"})
    config.save(found, tmp_path / "config.yaml")
    assert config.load_compare(str(tmp_path / "config.yaml")) == found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": []}, "needs at least one arm, one seed and one task"),
        ({"arms": {}}, "needs at least one arm, one seed and one task"),
        ({"tasks": {}}, "needs at least one arm, one seed and one task"),
        ({"seeds": [0, 1, 0]}, "seeds=[0, 1, 0] names one twice"),
        ({"choice_seeds": [1, 1]}, "choice_seeds=[1, 1] names one twice"),
        ({"choice_seeds": [2]}, "choice_seeds=[2] must be some of seeds=[0, 1]"),
        ({"choice_seeds": []}, "choice_seeds=[] must be some of seeds=[0, 1]"),
        ({"choice_seeds": None}, "choice_seeds is missing, and has no default"),
        ({"tasks": {"crops": []}}, "tasks.crops names nothing"),
        ({"arms": {"a": []}}, "arms.a names nothing"),
        ({"arms": {"a": 3}}, "arms must be a section of names"),
        ({"arms": {"a": {"recipe": "mpp_demo"}}}, "arms must be a section of names"),
        ({"tasks": {"crops": "finetune_demo"}}, "tasks must be a section of names"),
        ({"finetune": "finetune_demo"}, "unknown key finetune"),
        ({"baselines": ["luck"]}, "baselines must be a list such as [chance or raw_pixels or random_encoder or"),
        ({"probes": ["nearest"]}, "probes must be a list such as [linear or few_shot]"),
        ({"published": {"b": 0.5}}, "published figures for b, which is no arm; arms: a"),
        ({"published": {"a": 0.5}, "published_recipes": {"b": "mpp_b16"}}, "published figures for b, which is no arm"),
        ({"published": {"a": 79.9}}, "published.a=79.9 must be a share in (0, 1), such as 0.799"),
        ({"published_finetune": "finetune_b16"}, "go with published, which is missing"),
        ({"published": {"a": 0.5}, "published_finetune": "finetune_b61"}, "no such recipe; did you mean finetune_b16?"),
        ({"published": {"a": 0.5}, "published_recipes": {"a": "mpp_b61"}}, "no such recipe; did you mean mpp_b16?"),
        ({"arms": {"a b": "scratch", "a_b": "scratch"}}, "two of its arms would have the same folder"),
        (
            {"tasks": {"a/b": ["finetune_demo"], "a_b": ["finetune_demo"]}},
            "two of its tasks would have the same folder",
        ),
        ({"arms": {"random encoder": "scratch"}}, "an arm can't be named random_encoder"),
    ],
)
def test_what_is_refused_of_a_comparison(plan, changes, words):
    with pytest.raises(UserError) as caught:
        config.load_compare(plan(**changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "data.source=hub:a/b@hf_AbCdEfGhIjKlMnOpQr",
        "init=https://me:secret@hub/x",
        "runtime.push_to_hub=hf_AbCdEfGhIjKlMn",
    ],
)
def test_a_recipe_does_not_hold_a_token(override):
    with pytest.raises(UserError, match="holds what looks like an access token or a password") as error:
        config.load_run("mpp_demo", [override])
    assert "AbCdEf" not in str(error.value) and "secret" not in str(error.value)


def test_a_model_section_from_elsewhere_is_read_as_strictly_as_a_recipe():
    assert config.model_from({"name": "vit_base_patch16_224", "depth": 3}, "config.json").depth == 3
    for values, words in [
        ({"name": "vit", "checkpoint_path": "/etc/passwd"}, "unknown key model.checkpoint_path"),
        ({"name": "vit", "depth": "3"}, "config.json.*model.depth must be a whole number"),
        ({}, "config.json: model.name is missing"),
        (["vit"], "config.json: model is no section"),
        (None, "config.json: model is no section"),
    ]:
        with pytest.raises(UserError, match=words):
            config.model_from(values, "config.json")
