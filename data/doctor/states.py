# The cache of states of this target and these conversations: is it there, whole, of the right layers, and does the
# target's head make of it what it should.

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.doctor.case import Case
    from drafters.cache_manifest import Manifest
    from drafters.storage import Folder

__all__ = ["check", "check_content", "check_head_fits"]


def check(case: "Case") -> None:
    """Find the cache and look at everything in it but what needs the target."""
    from drafters.cache_manifest import MANIFEST, Manifest
    from drafters.splits import states_place

    findings = case.findings
    assert case.outline is not None
    assert case.encoder is not None
    if case.data.states == "online":
        findings.note("cache/found", "data.states=online: the target makes its states in each step, without a cache")
        return
    with findings.watched("cache/found"):
        key, folder = states_place(case.outline.spec, case.splits, case.cache, encoder=case.encoder)
        sizes = folder.sizes()
        manifest = Manifest.load(folder) if MANIFEST in sizes else None
        if manifest is None:
            findings.note("cache/found", f"none yet: a capture would make {folder}")
            _check_room(case, folder, 1.0)
        else:
            manifest.check_key(key, folder)
            _describe(case, folder, manifest, sizes)
            check_content(case, folder, manifest, sizes)
        _siblings(case, str(folder))


def _describe(case: "Case", folder: "Folder", manifest: "Manifest", sizes: dict[str, int]) -> None:
    findings, missing = case.findings, manifest.missing(sizes)
    size = sum(sizes.values()) / 1e9
    found = (
        f"{folder}: {manifest.num_samples:,} conversations, {manifest.num_tokens:,} tokens, layers "
        f"{list(manifest.layer_ids)}, {manifest.key.codec}, last={manifest.last}, {size:.2f} GB"
    )
    if not missing:
        findings.ok("cache/found", found)
        return
    parts = [f"{len(missing)} of {len(manifest.shards)} shards are missing, cut or grown"]
    names = [shard.name for number in missing if (shard := manifest.shards[number]) is not None]
    findings.problem(
        "cache/shards",
        f"{found}; {'; '.join(parts + names[:3])}",
        "python -m data.capture with the same settings makes them again",
    )
    _check_room(case, folder, len(missing) / len(manifest.shards))


def _check_room(case: "Case", folder: "Folder", share: float) -> None:
    """The bytes of a capture, of which `share` is to be made, against the room there is."""
    from data.plan import states_place
    from drafters.cache_writer import SPARE_BYTES
    from drafters.codecs import CODECS
    from drafters.planning import stored_bytes
    from drafters.states import predicts

    assert case.outline is not None
    masks = [one.loss_mask_T for one in case.examples]
    tokens = sum(map(len, masks))
    last = tokens if case.cache.last == "all" else sum(int(predicts(mask_T).sum()) for mask_T in masks)
    sizes: dict[str, int] = {"num_layers": len(case.cache.layer_ids), "hidden_size": case.outline.spec.hidden_size}
    needed = share * stored_bytes(CODECS[case.cache.codec], num_tokens=tokens, num_last=last, **sizes)
    _, free = states_place(case.cache)
    if free is None:
        case.findings.note("cache/room", f"a capture writes {needed / 1e9:.2f} GB; the room at {folder} is not known")
        return
    found = f"a capture writes {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free (5 % and 64 MiB stay spare)"
    if 1.05 * needed + SPARE_BYTES > free:
        advice = "cache.root= on another disk, cache.codec=int4, cache.last=supervised, fewer layers; or data=online"
        case.findings.problem("cache/room", found, advice)
    else:
        case.findings.ok("cache/room", found)


def check_content(case: "Case", folder: "Folder", manifest: "Manifest", sizes: dict[str, int]) -> None:
    """Checksums, lists, and files that do not belong."""
    from drafters.cache import HiddenCache
    from drafters.cache_manifest import MANIFEST, SAMPLES, SPLITS
    from drafters.cache_records import record_name, shard_name
    from drafters.cache_target import SPEC
    from drafters.storage import LOCK

    findings = case.findings
    numbers = range(len(manifest.shards))
    known = {MANIFEST, SAMPLES, SPLITS, SPEC, LOCK, *map(shard_name, numbers), *map(record_name, numbers)}
    known |= {shard.name for shard in manifest.shards if shard is not None}
    if foreign := sorted(set(folder.sizes()) - known):
        size = sum(sizes[name] for name in foreign) / 1e9
        names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        findings.note("cache/files", f"{len(foreign)} files are not the cache's own ({size:.2f} GB): {names}")
    else:
        findings.ok("cache/files", "no foreign file in its folder")
    if absent := sorted(set(case.cache.layer_ids) - set(manifest.layer_ids)):
        findings.problem(
            "cache/layers",
            f"it stores the layers {list(manifest.layer_ids)}, not {absent}, which cache.layer_ids asks for",
            "remove that folder and capture again, or ask for layers that it stores",
        )
    if case.config.checksums:
        _check_sums(case, folder, manifest, sizes)
    else:
        findings.note("cache/checksums", "not looked at: checksums=false")
    if not manifest.missing(sizes):
        with findings.watched("cache/lists"):
            case.states = HiddenCache.open(folder, verify=False)


def _check_sums(case: "Case", folder: "Folder", manifest: "Manifest", sizes: dict[str, int]) -> None:
    """Read every shard that is there in full size."""
    from drafters.progress import progress_bar

    shards = [one for one in manifest.shards if one is not None and sizes.get(one.name) == one.num_bytes]
    damaged = []
    with progress_bar("checksums", unit="shards", rate="MB") as advance:
        for done, shard in enumerate(shards, start=1):
            if not folder.is_intact(shard.name, shard.sha256):
                damaged.append(shard.name)
            advance(done, len(shards), round(shard.num_bytes / 1e6))
    if damaged:
        case.findings.problem(
            "cache/checksums",
            f"{len(damaged)} of {len(shards)} shards are damaged: {', '.join(map(folder.name_of, damaged[:3]))}",
            "remove these files; python -m data.capture with the same settings makes them again",
        )
    else:
        case.findings.ok("cache/checksums", f"{len(shards)} shards are as they were written")


def _siblings(case: "Case", place: str) -> None:
    """Other caches beside this one: of what, and how large."""
    from pathlib import Path

    from drafters.cache_manifest import MANIFEST, Manifest
    from drafters.errors import DataError
    from drafters.storage import is_url

    if is_url(place):
        return
    own = Path(place)
    names = sorted(path.parent for path in own.parent.glob(f"*/{MANIFEST}") if path.parent.name != own.name)
    if not names:
        return
    told, total = [], 0
    for path in names:
        size = sum(one.stat().st_size for one in path.iterdir() if one.is_file())
        total += size
        try:
            key: Any = Manifest.load(path).key
        except DataError:
            told.append(f"{path.name} (damaged)")
            continue
        is_own = case.outline is not None and key.weights_hash == case.outline.spec.weights_hash
        told.append(f"{path.name} (other {'conversations or settings' if is_own else 'target'})")
    found = f"{len(names)} other caches beside it, {total / 1e9:.2f} GB: {', '.join(told[:4])}"
    case.findings.note("cache/others", found + (", ..." if len(told) > 4 else ""), "remove those that nothing needs")


def check_head_fits(case: "Case") -> None:
    """Whether the target's head makes of the stored states the log-sum-exp that the capture stored."""
    from drafters.head_only import check_head

    if case.target is None or case.states is None:
        return
    before = len(case.findings.all)
    with case.findings.watched("cache/head"):
        check_head(case.target.head, case.states)
    if len(case.findings.all) == before:
        case.findings.ok("cache/head", "the target's output rows fit the stored states (log-sum-exp, one conversation)")
