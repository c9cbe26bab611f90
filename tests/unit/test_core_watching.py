"""NoticesHeard names the members' spot nodes whose notices nobody hears.

It also says what to do.
"""

from __future__ import annotations

import pytest

from scene import ENDED, Scene, training_job
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.notices import NodeWatch, WatchState
from spottrain_api.v1alpha1.status import Condition, Phase
from spottrain_operator.core.timing import DEFAULT_TIMING

WATCHED = NodeWatch(state=WatchState.WATCHED)
KUBERNETES_ALONE = NodeWatch(state=WatchState.WATCHED, hears_cloud=False)
MISSING = NodeWatch(
    state=WatchState.MISSING,
    seconds=DEFAULT_TIMING.unwatched,
    trouble="http://10.0.0.4:9401 does not answer: refused",
)
BLIND = NodeWatch(state=WatchState.BLIND, seconds=DEFAULT_TIMING.unwatched, trouble="EC2's metadata service is away.")


def watched_job() -> Scene:
    """Members 3 and 4 are on spot nodes, and somebody watches them."""
    return training_job().says(3, watch=WATCHED).says(4, watch=WATCHED).decided()


def condition(scene: Scene) -> Condition | None:
    return scene.plan().status.condition("NoticesHeard")


def events(scene: Scene) -> list[tuple[str, str]]:
    return [(event.type, event.reason) for event in scene.plan().events]


def test_a_job_whose_notices_are_heard() -> None:
    found = watched_job().observed.job.status.condition("NoticesHeard")
    assert found is not None
    assert (found.status, found.reason) == ("True", "Heard")


@pytest.mark.parametrize(
    ("watch", "reason", "words"),
    [
        (
            MISSING,
            "WatcherMissing",
            "(http://10.0.0.4:9401 does not answer: refused). Check that the chart's watcher",
        ),
        (BLIND, "WatcherBlind", "(EC2's metadata service is away). Read the watcher's log"),
    ],
    ids=["missing", "blind"],
)
def test_a_node_that_nobody_watches(watch: NodeWatch, reason: str, words: str) -> None:
    scene = watched_job().says(4, watch=watch)
    found = condition(scene)
    assert found is not None
    assert (found.status, found.reason) == ("False", reason)
    assert " on n4" in found.message
    assert ": a preemption there may come without notice (" in found.message
    assert words in found.message
    assert events(scene) == [("Warning", reason)]
    generation = scene.plan().status.generation
    assert generation is not None
    assert generation.reason is None, "no generation is ended by it"
    assert scene.plan().actions == ()


def test_nodes_of_no_known_cloud_are_named_with_advice_and_without_an_alarm() -> None:
    scene = watched_job().says(4, watch=KUBERNETES_ALONE)
    found = condition(scene)
    assert found is not None
    assert (found.status, found.reason) == ("True", "KubernetesOnly")
    assert found.message.startswith("On n4 the watcher knows no cloud, and hears only Kubernetes (taints, evictions,")
    assert "name the cloud as SPOTTRAIN_PROVIDER in the chart's value watcher.env" in found.message
    assert events(scene) == []
    told = scene.decided()
    assert told.says(4, watch=KUBERNETES_ALONE).plan().status == told.observed.job.status
    named = condition(told.says(4, watch=WATCHED))
    assert named is not None
    assert (named.status, named.reason) == ("True", "Heard")
    unheard = condition(told.says(3, watch=MISSING))
    assert unheard is not None
    assert (unheard.status, unheard.reason) == ("False", "WatcherMissing"), "what can be mended comes first"


def test_a_watcher_or_an_agent_of_before_says_nothing_of_its_cloud() -> None:
    said = '{"state": "watched", "seconds": 1.0}'
    found = condition(watched_job().says(3, watch=NodeWatch.from_json(said)))
    assert found is not None
    assert found.reason == "Heard"


def test_it_is_written_once_whatever_the_errors_words_are() -> None:
    unwatched = watched_job().says(4, watch=BLIND).decided()
    later = unwatched.says(4, watch=BLIND.model_copy(update={"seconds": 99.0, "trouble": "A timeout."}))
    assert later.plan().status == unwatched.observed.job.status
    assert later.plan().events == ()


def test_another_node_or_reason_is_news() -> None:
    unwatched = watched_job().says(4, watch=BLIND).decided()
    both = unwatched.says(3, watch=BLIND)
    found = condition(both)
    assert found is not None
    assert "The watcher on n3, n4 is blind" in found.message
    assert events(both) == [], "the reason is known"
    mixed = unwatched.says(3, watch=MISSING)
    found = condition(mixed)
    assert found is not None
    assert found.reason == "WatcherMissing"
    assert "answers on n3: a preemption" in found.message
    assert "On 1 other node the watcher is blind. Check that" in found.message
    assert events(mixed) == [("Warning", "WatcherMissing")]


def test_a_watcher_that_restarts_changes_nothing() -> None:
    soon = MISSING.model_copy(update={"seconds": DEFAULT_TIMING.unwatched - 1})
    heard = watched_job()
    assert heard.says(4, watch=soon).plan().status == heard.observed.job.status
    unheard = watched_job().says(4, watch=MISSING).decided()
    assert unheard.says(4, watch=WATCHED).says(3, watch=soon).plan().status == unheard.observed.job.status


def test_a_cloud_that_takes_its_time_for_the_first_answer_changes_nothing() -> None:
    starting = NodeWatch(
        state=WatchState.STARTING, seconds=149.0, trouble="Azure's metadata server has not answered."
    )
    new = training_job().says(3, watch=WATCHED).says(4, watch=starting)
    assert condition(new) is None
    assert events(new) == []
    heard = watched_job()
    assert heard.says(4, watch=starting).plan().status == heard.observed.job.status
    found = condition(heard.says(4, watch=BLIND))
    assert found is not None
    assert found.status == "False", "a late answer is another state"


def test_it_ends_when_somebody_watches_again() -> None:
    found = condition(watched_job().says(4, watch=MISSING).decided().says(4, watch=WATCHED))
    assert found is not None
    assert (found.status, found.reason) == ("True", "Heard")


def test_the_last_spot_member_that_goes_takes_it_along() -> None:
    unheard = watched_job().says(4, watch=MISSING).decided()
    generation = unheard.observed.job.status.generation
    assert generation is not None
    found = condition(unheard.generation(members=generation.members[:2]))
    assert found is not None
    assert found.status == "True"


def test_members_on_demand_have_no_watcher() -> None:
    assert condition(training_job()) is None
    assert condition(training_job().says(1, watch=MISSING)) is None


def test_between_generations_it_stays_as_it_was() -> None:
    unheard = watched_job().says(4, watch=MISSING).decided().generation(state=ENDED)
    assert condition(unheard.says(4, watch=WATCHED)) == unheard.observed.job.status.condition("NoticesHeard")


@pytest.mark.parametrize("watch", [WATCHED, MISSING], ids=["heard", "unheard"])
def test_a_job_that_is_over_has_no_node_to_be_heard_of(watch: NodeWatch) -> None:
    scene = watched_job().says(4, watch=watch).decided().all_say(phase=AgentPhase.SUCCEEDED).decided()
    assert scene.observed.job.status.phase is Phase.SUCCEEDED
    found = condition(scene)
    assert found is not None
    assert (found.status, found.reason) == ("True", "Finished")
    never = training_job().all_say(phase=AgentPhase.SUCCEEDED).decided()
    assert condition(never) is None


def test_a_long_list_and_a_hostile_error_stay_short() -> None:
    hostile = MISSING.model_copy(update={"trouble": "\x1b[2J\n" + "x" * 10_000})
    scene = watched_job()
    generation = scene.observed.job.status.generation
    assert generation is not None
    spot = generation.members[-1]
    many = tuple(spot.model_copy(update={"pod_uid": f"u{number}", "node": f"n{number}"}) for number in range(3, 300))
    scene = scene.generation(members=(*generation.members[:2], *many))
    for number in range(3, 300):
        scene = scene.says(number, watch=hostile)
    found = condition(scene)
    assert found is not None
    assert "n10, n100, n101, n102, n103 and 292 more: a preemption" in found.message
    assert found.message.isprintable()
    assert len(found.message) < 1000
