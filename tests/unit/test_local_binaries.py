"""Which binaries are used: given, cached, fetched or built ones."""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from spottrain_local.binaries import (
    ADD_ONS,
    CONTROL_PLANE,
    HELM,
    METRICS,
    STREAMS,
    find_add_on,
    find_binaries,
    find_crds,
    main,
    obtain_binaries,
)
from spottrain_local.built_binaries import PACKAGES, build_binaries
from spottrain_local.cli import local
from spottrain_local.cluster import Cluster
from spottrain_local.fetched_binaries import RELEASED
from spottrain_local.go_module import KUBERNETES, NEXT_KUBERNETES_MODULE, GoModule, KubernetesRelease
from spottrain_local.install import find_helm
from spottrain_local.layout import ClusterLayout, LocalClusterError, checkout_root
from spottrain_local.spec import DEFAULT_SPEC, load_spec

FAKE_GO = """#!/bin/sh
# Stands in for the Go tool: answers as it does, and "compiles" by touching files.
case "$1" in
  env) echo go1.26.6 ;;
  list)
    case "$2" in
      -m)
        mkdir -p "$0.sources/config/components/crd/bases" "$0.sources/config/components/webhook"
        mkdir -p "$0.sources/pkg/apis/crds" "$0.sources/kwok/apis/crds"
        echo "$0.sources" ;;
      *) printf 'a/b\\nc/d\\n' ;;
    esac ;;
  build)
    for word; do
      [ "$previous" = -o ] && target="$word"
      previous="$word"
    done
    for word; do
      case "$word" in
        -*|*/) ;;
        *.*/*) name=${word%/v[0-9]}; name=${name##*/}; echo $name >> "$0.built"; echo $name > "$target$name" ;;
      esac
    done
    AFTER
    printf 'a/b\\nc/d\\n' >&2 ;;
esac
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no variable that says where binaries come from."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("KUBEBUILDER_ASSETS", "SPOTTRAIN_BINARIES"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "cache" / "spottrain"


@dataclass
class Source:
    """Has some binaries, and notes which it was asked for."""

    has: Collection[str]
    failures: Collection[str] = ()
    asked: list[set[str]] = field(default_factory=list)
    error: LocalClusterError | None = None

    def fetch(self, names: Collection[str], into: Path, console: Console, *, module: GoModule) -> Collection[str]:
        self.asked.append(set(names))
        for name in set(names) & set(self.has):
            (into / name).write_text(f"{name} of {module.name}")
        if self.error:
            raise self.error
        return self.failures

    def build(self, names: Collection[str], into: Path, console: Console, *, module: GoModule) -> None:
        self.fetch(names, into, console, module=module)


@dataclass
class Obtained:
    """The outcome of one call."""

    said: str
    fetched: list[set[str]]
    built: list[set[str]]


def obtain(*names: str, released: Source, sources: Source | None = None) -> Obtained:
    """Obtain binaries from releases and sources that are both fakes."""
    sources = sources or Source(PACKAGES)
    output = StringIO()
    binaries = obtain_binaries(names, Console(file=output, width=80), fetch=released.fetch, build=sources.build)
    assert binaries == find_binaries(*names)
    assert all(binaries.path(name).read_text() == f"{name} of controlplane" for name in names)
    return Obtained(said=output.getvalue(), fetched=released.asked, built=sources.asked)


def test_what_is_fetched_is_not_built() -> None:
    done = obtain("etcd", "helm", released=Source(RELEASED))
    assert (done.fetched, done.built, done.said) == ([{"etcd", "helm"}], [], "")


def test_what_is_in_the_cache_is_not_obtained_again() -> None:
    obtain("etcd", released=Source(RELEASED))
    again = obtain("etcd", "helm", released=Source(RELEASED))
    assert (again.fetched, again.built) == ([{"helm"}], [])
    assert obtain("etcd", "helm", released=Source(RELEASED)).fetched == []


def test_what_cannot_be_fetched_is_built_and_one_line_says_why() -> None:
    done = obtain("etcd", "helm", released=Source(["helm"], ["github.com does not answer", "and more"]))
    assert (done.fetched, done.built) == ([{"etcd", "helm"}], [{"etcd"}])
    assert done.said == (
        "Building etcd from source, once. All binaries take about six minutes on two cores. Not fetched: "
        "github.com does not answer; and more.\n"
    )


def test_what_nobody_releases_is_built() -> None:
    done = obtain(STREAMS, METRICS, released=Source(RELEASED))
    assert (done.fetched, done.built) == ([], [{STREAMS, METRICS}])
    assert "Not fetched" not in done.said


def test_a_user_may_want_all_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTTRAIN_BINARIES", "build")
    done = obtain("etcd", "helm", released=Source(RELEASED))
    assert (done.fetched, done.built) == ([], [{"etcd", "helm"}])


def test_a_user_may_want_nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTTRAIN_BINARIES", "fetch")
    sources = Source(PACKAGES)
    with pytest.raises(LocalClusterError, match=r"is fetch, and etcd cannot be fetched: github.com hangs\. Unset"):
        obtain("etcd", "helm", released=Source(["helm"], ["github.com hangs"]), sources=sources)
    with pytest.raises(LocalClusterError, match=f"is fetch, and {STREAMS} cannot be fetched: no release has it"):
        obtain(STREAMS, released=Source(RELEASED), sources=sources)
    assert sources.asked == []
    assert obtain("helm", released=Source([]), sources=sources).fetched == []


def test_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTTRAIN_BINARIES", "download")
    with pytest.raises(LocalClusterError, match=r"SPOTTRAIN_BINARIES is 'download'. Set it to fetch or build"):
        obtain("etcd", released=Source(RELEASED))
    refused = CliRunner().invoke(main)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "SPOTTRAIN_BINARIES is 'download'." in refused.stderr


def test_a_failure_in_the_middle_leaves_nothing(cache: Path) -> None:
    broken = Source(["etcd"], error=LocalClusterError("no space left"))
    for fails in ({"released": broken}, {"released": Source([]), "sources": broken}):
        with pytest.raises(LocalClusterError, match="no space left"):
            obtain("etcd", "helm", **fails)
        assert list(cache.glob("controlplane-*")) == []


def test_what_a_killed_process_has_left_goes(cache: Path) -> None:
    leftover = cache / "controlplane-0123456789ab.partial-x" / "built"
    leftover.mkdir(parents=True)
    obtain("etcd", released=Source(RELEASED))
    assert not leftover.parent.exists()


@pytest.fixture
def fake_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Go tool on the PATH that builds nothing."""
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(FAKE_GO.replace("AFTER", ""))
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SPOTTRAIN_BINARIES", "build")
    return go


def built_by(go: Path) -> set[str]:
    """The programs that a fake Go has built."""
    return set(go.with_name("go.built").read_text().split())


def test_all_binaries_can_be_built_at_once(fake_go: Path, tmp_path: Path) -> None:
    (tmp_path / "built").mkdir()
    build_binaries(PACKAGES, tmp_path / "built", Console(quiet=True))
    assert {path.name for path in (tmp_path / "built").iterdir()} == set(PACKAGES)
    assert not (tmp_path / "built.go").exists()


def test_a_failed_build_leaves_nothing_and_says_why(fake_go: Path, cache: Path) -> None:
    fake_go.write_text(FAKE_GO.replace("AFTER", "echo no space left on device; exit 1"))
    with pytest.raises(LocalClusterError, match="no space left on device"):
        obtain_binaries(["etcd"], Console(quiet=True))
    assert list(cache.glob("controlplane-*")) == []


@pytest.mark.parametrize(
    ("arguments", "built"),
    [
        ([], {*CONTROL_PLANE, HELM}),
        (["--all"], {*PACKAGES}),
        (["etcdctl", "helm"], {"etcdctl", "helm"}),
    ],
)
def test_the_command_obtains_binaries(arguments: list[str], built: set[str], fake_go: Path, cache: Path) -> None:
    done = CliRunner().invoke(main, arguments)
    [folder] = cache.glob("controlplane-*")
    assert {path.name for path in folder.iterdir()} == built
    named = [f"{folder / name}" for name in arguments if name in built]
    assert done.stdout.splitlines() == (named or [f"Control plane binaries: {folder}"])


@pytest.mark.parametrize("module", ADD_ONS, ids=lambda module: module.name)
def test_an_add_on_is_built_once_from_a_module_of_its_own(module: GoModule, fake_go: Path, cache: Path) -> None:
    with pytest.raises(LocalClusterError, match=rf"There is no .*/{module.name}\. Run `make {module.name}`"):
        find_add_on(module)
    for _ in range(2):
        done = CliRunner().invoke(main, [module.name])
        [folder] = cache.glob(f"{module.name}-*")
        assert done.stdout.splitlines() == [str(folder / module.name)]
    assert find_add_on(module) == folder / module.name
    assert {path.name for path in folder.iterdir()} == {module.name, *module.folders}
    assert len(fake_go.with_name("go.built").read_text().split()) == 1
    assert not list(cache.glob("controlplane-*"))


@pytest.mark.parametrize("module", ADD_ONS, ids=lambda module: module.name)
def test_the_definitions_of_an_add_on_are_fetched_without_a_build(
    module: GoModule, fake_go: Path, cache: Path
) -> None:
    with pytest.raises(LocalClusterError, match=rf"There is no .*/crds\. Run `make {module.name}-crds`"):
        find_crds(module)
    for _ in range(2):
        done = CliRunner().invoke(main, [f"{module.name}-crds"])
        assert done.stdout.splitlines() == [str(find_crds(module))]
    assert not fake_go.with_name("go.built").exists()
    assert CliRunner().invoke(main, [module.name]).exit_code == 0, "a build leaves them where they are"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], {*CONTROL_PLANE, HELM, STREAMS, METRICS}),
        (["--no-operator"], {*CONTROL_PLANE, STREAMS, METRICS}),
        (["--no-exec", "--no-operator"], {*CONTROL_PLANE}),
    ],
)
def test_a_cluster_obtains_what_it_needs(options: list[str], wanted: set[str], fake_go: Path) -> None:
    fake_go.write_text(FAKE_GO.replace("AFTER", "echo it is enough; exit 1"))
    done = CliRunner().invoke(local, ["up", *options])
    assert done.exit_code == 1
    assert "it is enough" in done.output
    assert {"etcd" if name == "server" else name for name in built_by(fake_go)} == wanted


def test_a_cluster_starts_without_what_only_some_commands_need(
    fake_go: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obtain_binaries([*CONTROL_PLANE, HELM], Console(quiet=True))
    fake_go.write_text(FAKE_GO.replace("AFTER", "echo no module proxy; exit 1"))
    monkeypatch.setenv("PATH", f"{fake_go.parent}:/bin")
    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", str(tmp_path / "home"))
    # What it then lacks is a state folder that can be written.
    (tmp_path / "home").write_text("")
    done = CliRunner().invoke(local, ["up"])
    assert re.search(r"`kubectl exec`, .* and `top` will not work\. [^`]*`\S+go build` failed", done.output)
    assert "no module proxy" in done.output
    assert "The cluster's state cannot be written" in done.output


def test_the_next_kubernetes_comes_of_a_module_of_its_own_and_the_rest_is_shared(cache: Path) -> None:
    def obtained(release: KubernetesRelease) -> dict[str, str]:
        source = Source(PACKAGES)
        names = [*CONTROL_PLANE, HELM]
        binaries = obtain_binaries(
            names, Console(quiet=True), release=release, fetch=source.fetch, build=source.build
        )
        assert binaries == find_binaries(*names, release=release)
        return {name: binaries.path(name).read_text().rpartition(" ")[2] for name in names}

    default = dict.fromkeys([*CONTROL_PLANE, HELM], "controlplane")
    assert obtained("1.36") == default
    assert obtained("1.37") == default | dict.fromkeys(KUBERNETES, NEXT_KUBERNETES_MODULE.name)
    assert obtained("1.36") == default


def test_the_next_kubernetes_is_built_with_its_own_version_stamp(fake_go: Path, tmp_path: Path) -> None:
    fake_go.write_text(FAKE_GO.replace("AFTER", f'echo "$@" > {tmp_path}/said'))
    (tmp_path / "built").mkdir()
    build_binaries(["kube-scheduler"], tmp_path / "built", Console(quiet=True), module=NEXT_KUBERNETES_MODULE)
    said = (tmp_path / "said").read_text()
    assert re.search(r"version\.gitVersion=v1\.37\.\d+ .*gitMajor=1 .*gitMinor=37", said)
    assert "helm" not in said


def test_foreign_binaries_are_of_no_other_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    with pytest.raises(LocalClusterError, match=r"KUBEBUILDER_ASSETS names .* Kubernetes 1\.37\. Unset"):
        obtain_binaries(CONTROL_PLANE, Console(quiet=True), release="1.37")


@pytest.mark.parametrize("written", ["1.37", '"1.37"'])
def test_a_file_of_nodes_may_name_a_release_of_kubernetes(written: str, tmp_path: Path) -> None:
    (tmp_path / "nodes.yaml").write_text(f"kubernetes: {written}\nnodes: []\n")
    assert load_spec(tmp_path / "nodes.yaml").kubernetes == "1.37"
    (tmp_path / "nodes.yaml").write_text("kubernetes: 1.35\nnodes: []\n")
    with pytest.raises(LocalClusterError, match=r"kubernetes: .*1\.36.* or .*1\.37"):
        load_spec(tmp_path / "nodes.yaml")


def test_a_cluster_keeps_its_kubernetes_and_never_goes_back(tmp_path: Path) -> None:
    cluster = Cluster(layout=ClusterLayout(root=tmp_path / "lab"))
    newer = cluster.with_choices(None, kubernetes="1.37")
    assert newer == DEFAULT_SPEC.model_copy(update={"kubernetes": "1.37"})
    assert cluster.release_of(None) == "1.36"
    cluster.layout.root.mkdir()
    cluster.layout.spec.write_text(newer.model_dump_json(by_alias=True))
    assert (cluster.with_choices(None), cluster.release_of(None)) == (None, "1.37")
    with pytest.raises(
        LocalClusterError, match=r"has run Kubernetes 1\.37, .* `spottrain local down --delete --name lab`"
    ):
        cluster.up(DEFAULT_SPEC)


def test_foreign_binaries_must_be_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    with pytest.raises(LocalClusterError, match=r"There is no etcd in .*KUBEBUILDER_ASSETS"):
        obtain("etcdctl", released=Source(RELEASED))
    for name in CONTROL_PLANE:
        (tmp_path / name).touch()
    assert obtain_binaries(PACKAGES, Console(quiet=True)).folder == tmp_path
    with pytest.raises(LocalClusterError, match=r"There is no helm in .*KUBEBUILDER_ASSETS"):
        find_binaries(HELM)


def test_helm_is_taken_from_the_path_where_the_foreign_binaries_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets, on_path = tmp_path / "assets", tmp_path / "bin" / "helm"
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    monkeypatch.setenv("PATH", str(on_path.parent))
    with pytest.raises(LocalClusterError, match=r"There is no helm in .*KUBEBUILDER_ASSETS"):
        find_helm()
    for helm in (on_path, assets / "helm"):
        helm.parent.mkdir()
        helm.touch(mode=0o755)
        assert find_helm() == str(helm)


def test_the_readme_says_what_foreign_binaries_must_have() -> None:
    readme = (checkout_root() / "README.md").read_text()
    [section] = [part for part in readme.split("\n## ") if "KUBEBUILDER_ASSETS" in part]
    assert [name for name in PACKAGES if f"`{name}`" not in section] == []
    go_mod = checkout_root() / "local-cluster" / "controlplane" / "go.mod"
    pinned = re.findall(r"k8s.io/kubernetes (v\S+)", go_mod.read_text())
    assert re.findall(r"/release/(v[^/]+)/bin", section) == pinned
    minor = pinned[0].removeprefix("v").rpartition(".")[0]
    assert re.findall(r"(?:-p path |release \()(\d+\.\d+)", section) == [minor, minor]
