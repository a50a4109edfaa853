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
    ],
)
def test_what_is_refused_and_how(tiny, override, words):
    if words is None:
        message = refusal(tiny(), override, "runtime.log_every=2")
        assert "runtime.save_every=5 must be a multiple of runtime.log_every=2" in message
    else:
        assert words in refusal(tiny(), override)


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


def test_comparisons(tmp_path):
    found = config.load_compare("compare_demo")
    assert list(found.arms) == ["self-supervised", "supervised", "from scratch"]
    assert len(found.seeds) >= 3
    path = tmp_path / "mine.yaml"
    path.write_text("finetune: finetune_demo\nseeds: []\narms: {a: scratch}\n")
    with pytest.raises(UserError, match="at least one arm and one seed"):
        config.load_compare(str(path))
    path.write_text("finetune: finetune_demo\nseeds: [0, 1, 0]\narms: {a: scratch}\n")
    with pytest.raises(UserError, match="names one twice"):
        config.load_compare(str(path))
    for arms in ("{a: 3}", "{a: {recipe: mpp_demo}, b: scratch}"):
        path.write_text(f"finetune: finetune_demo\nseeds: [0]\narms: {arms}\n")
        with pytest.raises(UserError, match="arms must be a section of names"):
            config.load_compare(str(path))
    with pytest.raises(UserError, match="is a comparison: eval/compare.py takes it"):
        config.load_run("compare_demo")
    path.write_text("finetune: finetune_demo\nseeds: [0]\narms: {a: 3}\n")
    with pytest.raises(UserError, match="arms must be a section of names"):
        config.load_compare(str(path))
