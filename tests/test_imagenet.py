"""mpp/imagenet.py against timm's own evaluator, published facts, and mapping files in ObjectNet's form."""

import json

import numpy as np
import pytest
import torch
from timm.data import ImageNetInfo
from timm.data.real_labels import RealLabelsImagenet

from mpp import imagenet
from mpp.errors import UserError

SYNSETS = imagenet.synsets()
# Places of some classes that everyone agrees on, and their names in the hub's ILSVRC/imagenet-1k.
KNOWN = {
    0: ("n01440764", "tench, Tinca tinca"),
    134: ("n02012849", "crane"),
    517: ("n03126707", "crane2"),
    638: ("n03710637", "maillot"),
    639: ("n03710721", "maillot, tank suit"),
    409: ("n02708093", "analog clock"),
    530: ("n03196217", "digital clock"),
    999: ("n15075141", "toilet tissue, toilet paper, bathroom tissue"),
}


def hub_names():
    names = ImageNetInfo("imagenet-1k").label_descriptions()
    for number, (_, name) in KNOWN.items():
        names[number] = name
    return names


def file_name(image, folder="validation/n01751748/"):
    return f"/data/{folder}ILSVRC2012_val_{image:08d}_n01751748.JPEG"


def test_synsets_are_the_thousand_in_their_order():
    assert len(SYNSETS) == len(set(SYNSETS)) == 1000 and sorted(SYNSETS) == SYNSETS
    assert {number: SYNSETS[number] for number in KNOWN} == {number: synset for number, (synset, _) in KNOWN.items()}


# ---------------------------------------------------------------- ReaL


def test_accuracy_under_real_labels_is_timms():
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(50_000, generator=generator).tolist()
    theirs = RealLabelsImagenet([f"ILSVRC2012_val_{image + 1:08d}.JPEG" for image in order], topk=(1, 5))
    logits = torch.rand(50_000, 100, generator=generator)  # of the first 100 classes
    logits[torch.arange(50_000), torch.randint(0, 100, (50_000,), generator=generator)] += 1
    theirs.add_result(logits)
    labels = imagenet.real_labels([file_name(image + 1) for image in order])
    assert labels.dtype == np.int32 and labels.shape == (50_000, 9)
    labelled = (labels >= 0).any(1)
    assert labelled.sum() == len(theirs.is_correct[1]) == 46_837  # of 50,000, as the paper says
    best = logits.topk(5).indices.numpy()
    for k in (1, 5):
        right = (best[:, :k, None] == labels[:, None]).any((1, 2))
        assert 100 * right[labelled].mean() == pytest.approx(theirs.get_accuracy(k), abs=1e-9)
        assert right.any() and not right[~labelled].any()


def test_an_image_has_its_own_rising_labels_or_none():
    labels = imagenet.real_labels([file_name(2), file_name(1), "ILSVRC2012_val_00000003.JPEG"])
    assert labels.tolist() == [[795, 970], [-1, -1], [230, 231]]  # the file has [970, 795], [] and [230, 231]
    assert imagenet.real_labels([file_name(1)]).tolist() == [[-1]]


def test_the_number_is_taken_from_the_file_and_not_from_a_folder():
    name = file_name(2, folder="ILSVRC2012_val_00000003/")
    assert imagenet.real_labels([name]).tolist() == [[795, 970]]


@pytest.mark.parametrize(
    "name", ["n01440764_10026.JPEG", "ILSVRC2012_val_00050001.JPEG", "ILSVRC2012_val_00000000.JPEG"]
)
def test_a_name_without_the_number_of_a_validation_image_is_refused(name):
    with pytest.raises(UserError, match=r"must hold ILSVRC2012_val_00000001 to ILSVRC2012_val_00050000"):
        imagenet.real_labels([file_name(1), name])


# ---------------------------------------------------------------- names of classes


V2 = sorted(str(number) for number in range(1000))  # as folders sort: 0, 1, 10, 100, 101, ...


@pytest.mark.parametrize("here", [SYNSETS, hub_names(), [str(number) for number in range(1000)]])
def test_the_folders_of_imagenet_v2_are_numbers_and_no_places(here):
    assert V2[:4] == ["0", "1", "10", "100"]
    assert imagenet.map_classes(V2, here).tolist() == [int(name) for name in V2]


@pytest.mark.parametrize("there", [SYNSETS, hub_names(), V2, [f"{number:04d}" for number in range(1000)]])
@pytest.mark.parametrize("here", [SYNSETS, hub_names(), V2])
def test_classes_meet_by_what_they_are(there, here):
    numbers = imagenet.map_classes(there, here)
    assert numbers.dtype == np.int32 and sorted(numbers) == list(range(1000))
    for number, (synset, name) in KNOWN.items():
        mine = {synset, name, str(number)}
        at = next(place for place, other in enumerate(there) if other in {*mine, f"{number:04d}"})
        assert here[numbers[at]] in mine


def test_a_part_of_imagenets_classes_in_another_order():
    assert imagenet.map_classes(["n03196217", "n02708093"], ["0", "409", "530"]).tolist() == [2, 1]


def test_equal_names_need_not_be_imagenets():
    assert imagenet.map_classes(["dog", "crane"], ["crane", "cat", "dog"]).tolist() == [2, 0]
    assert imagenet.map_classes(["1", "10", "2"], ["1", "10", "11", "2"]).tolist() == [0, 1, 3]


def test_classes_that_cannot_be_mapped_are_listed():
    with pytest.raises(UserError) as refusal:
        imagenet.map_classes([*SYNSETS[:3], *[f"class {number}" for number in range(8)]], SYNSETS)
    assert "8 of the 11 classes" in str(refusal.value) and "'class 0'" in str(refusal.value)
    assert "and 3 more" in str(refusal.value) and "class 5" not in str(refusal.value)
    with pytest.raises(UserError, match=r"1 of the 2 classes .* '999', where the model has 'n01440764'"):
        imagenet.map_classes(["0", "999"], SYNSETS[:10])
    with pytest.raises(UserError, match="990 of the 1000 classes"):
        imagenet.map_classes(SYNSETS, [str(number) for number in range(10)])
    with pytest.raises(UserError, match="1 of the 1 classes"):
        imagenet.map_classes(["1000"], SYNSETS)


def test_a_model_with_two_names_of_one_class_is_refused():
    with pytest.raises(UserError, match="under two names: 'crane', 'n02012849'"):
        imagenet.map_classes(["0", "134"], ["crane", "tench, Tinca tinca", "n02012849"])


def test_labels_are_renumbered_and_missing_ones_stay_so():
    numbers = np.array([3, 2, 1, 0], dtype=np.int32)
    sets = imagenet.renumbered(np.array([[0, 1], [3, -1], [-1, -1]]), numbers)
    assert sets.dtype == np.int32 and sets.tolist() == [[3, 2], [0, -1], [-1, -1]]
    assert imagenet.renumbered(np.array([0, 3, 1]), numbers).tolist() == [[3], [0], [2]]


def test_an_image_of_imagenet_v2_gets_the_models_label():
    classes = [SYNSETS[number] for number in (9, 10, 100)]
    labels = imagenet.renumbered(np.array([1, 0, 2]), imagenet.map_classes(["10", "100", "9"], classes))
    assert labels.tolist() == [[2], [1], [0]]


# ---------------------------------------------------------------- ObjectNet


@pytest.fixture
def mappings(tmp_path):
    """ObjectNet's four files for five of its classes; lines stand in another order than PyTorch's numbers."""
    lines = np.random.default_rng(0).permutation(1000)  # number of the class in each line
    names = ImageNetInfo("imagenet-1k").label_descriptions()
    files = {
        "folder_to_objectnet_label.json": {
            "air_freshener": "Air freshener",
            "alarm_clock": "Alarm clock",
            "backpack": "Backpack",
            "bike": "Bike",
            "t-shirt": "T-shirt",
        },
        "objectnet_to_imagenet_1k.json": {
            "Alarm clock": "digital clock; analog clock",
            "Backpack": "backpack, back pack, knapsack, packsack, rucksack, haversack",
            "Bike": "mountain bike, all-terrain bike, off-roader; bicycle-built-for-two, tandem bicycle, tandem",
            "T-shirt": "jersey, T-shirt, tee shirt",
        },
        "pytorch_to_imagenet_2012_id.json": {str(number): int(line) for line, number in enumerate(lines)},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "imagenet_to_label_2012_v2").write_text("".join(f"{names[number]}\n" for number in lines))
    return tmp_path


def test_objectnets_classes_are_imagenets(mappings):
    folders = ["air_freshener", "alarm_clock", "backpack", "bike", "t-shirt"]
    labels = imagenet.objectnet_labels(mappings, folders)
    assert (
        labels.dtype == np.int32
    )  # by the table that others have published: alarm clock 409 and 530, bike 444 and 671
    assert labels.tolist() == [[-1, -1], [409, 530], [414, -1], [444, 671], [610, -1]]
    assert imagenet.objectnet_labels(mappings, ["backpack", "air_freshener"]).tolist() == [[414], [-1]]


def test_images_of_objectnet_get_the_labels_of_their_folder(mappings):
    folders, classes = ["air_freshener", "alarm_clock"], [SYNSETS[number] for number in range(999, -1, -1)]
    images = imagenet.objectnet_labels(mappings, folders)[np.array([1, 0, 1])]
    labels = imagenet.renumbered(images, imagenet.map_classes(SYNSETS, classes))
    assert labels.tolist() == [[999 - 409, 999 - 530], [-1, -1], [999 - 409, 999 - 530]]


@pytest.mark.parametrize("name", imagenet.OBJECTNET_FILES)
def test_a_missing_mapping_is_named(mappings, name):
    (mappings / name).unlink()
    with pytest.raises(
        UserError, match=rf"{name} can't be read \(No such file.*holds folder_to_objectnet_label.json, "
    ):
        imagenet.objectnet_labels(mappings, ["backpack"])


def test_damaged_mappings_and_other_folders_are_refused(mappings):
    with pytest.raises(UserError, match="'n01440764': no folders of ObjectNet's classes"):
        imagenet.objectnet_labels(mappings, ["backpack", "n01440764"])
    lines = (mappings / "imagenet_to_label_2012_v2").read_text()
    for spoiled in (
        lines.replace("digital clock\n", "clock\n"),
        lines.replace("stopwatch, stop watch", "digital clock"),
    ):
        (mappings / "imagenet_to_label_2012_v2").write_text(spoiled)
        with pytest.raises(UserError, match="'digital clock' of 'Alarm clock' is not one of the lines"):
            imagenet.objectnet_labels(mappings, ["alarm_clock"])
        assert imagenet.objectnet_labels(mappings, ["backpack"]).tolist() == [[414]]
    (mappings / "objectnet_to_imagenet_1k.json").write_text("{")
    with pytest.raises(UserError, match=r"objectnet_to_imagenet_1k.json can't be read \(Expecting"):
        imagenet.objectnet_labels(mappings, ["backpack"])
