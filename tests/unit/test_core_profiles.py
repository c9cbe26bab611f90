"""What a job takes from a profile, and that neither the profile's edits nor its own end what runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from scene import Scene, training, training_job
from spottrain_api.v1alpha1.profile import ProfileSpec, beyond, with_profile, within
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import Phase, TakenProfile
from spottrain_operator.core.model import CreatePod, ProfileView
from world.jobs import spec_of

POOL = {"name": "h100", "capacityType": "spot", "provider": "eks", "pricePerHour": 30.0}
TAINT = {"key": "team", "operator": "Exists"}
PROFILE = {
    "image": "registry/train:1",
    "capacity": {"currency": "EUR", "onDemand": {"pricePerHour": 98.0}, "pools": [POOL]},
    "tolerations": [TAINT],
    "limits": {"nodes": 4, "serviceAccounts": ["trainer", "other"]},
}


def profile(**changes: Any) -> ProfileSpec:
    return ProfileSpec.model_validate(PROFILE | changes)


def job(**changes: Any) -> TrainingJobSpec:
    return spec_of(**({"profile": "gpu", "capacity": {}} | changes))


def test_a_job_takes_what_it_does_not_name_itself() -> None:
    taken = with_profile(job(image=""), profile())
    assert taken.image == "registry/train:1"
    assert [pool.name for pool in taken.capacity.pools] == ["h100"]
    assert (taken.capacity.currency, taken.capacity.on_demand.price_per_hour) == ("EUR", 98.0)
    assert [each.key for each in taken.pod_template.tolerations] == ["team"]
    assert taken.pod_template.service_account_name == "trainer"


def test_what_the_job_names_itself_comes_first() -> None:
    own = {"pools": [POOL | {"name": "own", "pricePerHour": 1.0}], "onDemand": {"pricePerHour": 2.0}}
    template = {"serviceAccountName": "other", "tolerations": [{"key": "own", "operator": "Exists"}]}
    taken = with_profile(job(image="mine:1", capacity=own, podTemplate=template), profile())
    assert taken.image == "mine:1"
    assert [(pool.name, pool.price_per_hour) for pool in taken.capacity.pools] == [("own", 1.0)]
    assert (taken.capacity.currency, taken.capacity.on_demand.price_per_hour) == ("USD", 2.0)
    assert [each.key for each in taken.pod_template.tolerations] == ["team", "own"]
    assert taken.pod_template.service_account_name == "other"


def test_prices_of_two_currencies_are_not_mixed() -> None:
    taken = with_profile(job(capacity={"spot": {"pricePerHour": 1.0}}), profile())
    assert (taken.capacity.currency, taken.capacity.on_demand.price_per_hour) == ("USD", None)
    assert [pool.price_per_hour for pool in taken.capacity.pools] == [None]


def test_an_empty_profile_changes_nothing() -> None:
    assert with_profile(job(), ProfileSpec()) == job()
    assert beyond(job(), "gpu", ProfileSpec()) == []
    assert within(job(), ProfileSpec().limits) == job()


@pytest.mark.parametrize(
    ("changes", "given", "said"),
    [
        ({"image": ""}, {"image": ""}, "image is missing: neither the job nor profile gpu has one"),
        ({"nodes": {"min": 2, "max": 5}}, {}, "nodes.max is 5, and profile gpu allows 4; lower it"),
        (
            {"podTemplate": {"serviceAccountName": "admin"}},
            {},
            "podTemplate.serviceAccountName is admin, and profile gpu allows trainer, other; name one of these",
        ),
        (
            {"budget": {"maxCost": 5}, "nodes": {"min": 1, "max": 4}},
            {"capacity": {"spot": {"pricePerHour": 1.0}}},
            "budget.maxCost bounds nothing without prices, and neither the job nor profile gpu has one of on-demand",
        ),
    ],
    ids=["image", "nodes", "service account", "budget"],
)
def test_what_is_beyond_a_profile_is_named_with_what_to_change(
    changes: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    offered = profile(**given)
    [sentence] = beyond(with_profile(job(**({"nodes": {"min": 1, "max": 4}} | changes)), offered), "gpu", offered)
    assert sentence.startswith(said)


def offered(scene: Scene, view: ProfileView | None) -> Scene:
    return replace(scene, observed=replace(scene.observed, profile=view))


def new_job(view: ProfileView | None) -> Scene:
    scene = (
        training_job().spec(profile="gpu", nodes={"min": 2, "max": 4}).status(generation=None, phase=Phase.PENDING)
    )
    for sequence in range(1, 5):
        scene = scene.without_pod(sequence)
    return offered(scene, view)


def created(scene: Scene) -> int:
    return sum(isinstance(action, CreatePod) for action in scene.plan().actions)


def said(scene: Scene) -> tuple[str, str, str]:
    condition = scene.plan().status.condition("ProfileAccepted")
    assert condition is not None
    return condition.status, condition.reason, condition.message


def test_a_job_takes_its_profile_before_it_creates_pods() -> None:
    view = ProfileView(name="gpu", generation=3, spec=profile(limits={"nodes": 4}))
    scene = new_job(view)
    decided = scene.plan()
    assert decided.status.profile == TakenProfile(name="gpu", generation=3, spec=profile(limits={"nodes": 4}))
    assert created(scene) == 0
    assert decided.requeue_after is not None
    assert decided.requeue_after < 0.1
    assert created(offered(scene.decided(), None)) == 4
    assert said(scene) == ("True", "ProfileTaken", "The job has what it takes from profile gpu (status.profile)")


@pytest.mark.parametrize(
    ("view", "reason", "text"),
    [
        (
            ProfileView(name="gpu"),
            "ProfileMissing",
            "There is no TrainingProfile gpu. `kubectl get trainingprofiles`",
        ),
        (
            ProfileView(name="gpu", spec=profile(limits={"nodes": 2})),
            "ProfileLimits",
            "nodes.max is 4, and profile gpu allows 2; lower it",
        ),
    ],
    ids=["missing", "too small"],
)
def test_a_job_without_its_profile_waits_and_says_why(view: ProfileView, reason: str, text: str) -> None:
    scene = new_job(view)
    decided = scene.plan()
    assert created(scene) == 0
    assert decided.status.profile is None
    assert said(scene)[:2] == ("False", reason)
    assert decided.status.message.startswith(text)
    assert [event.reason for event in decided.events] == [reason]
    assert not scene.decided().plan().events, "the event is written once"


def running(limits: dict[str, Any], **changes: Any) -> Scene:
    """A job that trains, with what it took from a profile with these limits."""
    taken = TakenProfile(name="gpu", spec=profile(limits=limits))
    return training_job().status(profile=taken).job(**changes)


def test_a_running_job_that_is_edited_beyond_its_limits_trains_on() -> None:
    scene = running({"nodes": 4}, beyond_profile=("nodes.max is 9, and profile gpu allows 4; lower it",))
    decided = scene.all_say(progress=training(10)).plan()
    assert decided.status.generation == scene.observed.job.status.generation
    assert not [action for action in decided.actions if not type(action).__name__.startswith("Annotate")]
    assert said(scene) == (
        "False",
        "ProfileLimits",
        "nodes.max is 9, and profile gpu allows 4; lower it. Until then, the job keeps to the limits",
    )


def test_an_edit_beyond_the_limits_is_cut_back() -> None:
    limits = profile(limits={"nodes": 2, "serviceAccounts": ["trainer"]}).limits
    cut = within(job(nodes={"min": 3, "max": 9}, podTemplate={"serviceAccountName": "admin"}), limits)
    assert (cut.nodes.min, cut.nodes.max, cut.pod_template.service_account_name) == (2, 2, "trainer")


@pytest.mark.parametrize(
    "spec",
    [
        {"capacity": {"onDemand": {"pricePerHour": -1}}},
        {"capacity": {"spot": {"pricePerHour": float("nan")}}},
        {"limits": {"nodes": 0}},
        {"limits": {"nodes": 5000}},
        {"image": "two\nlines"},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_profile_that_makes_no_sense_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ProfileSpec.model_validate(spec)
