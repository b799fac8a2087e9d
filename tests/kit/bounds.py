"""Rows of the table of bounds (ARCHITECTURE.md, section 11) but the gateway's."""

from __future__ import annotations

ROWS: dict[str, tuple[str, ...]] = {
    "accept queue": ("pilotlight.listen.BACKLOG",),
    "queue of a Model": ("autoscaler.contract.QueueLimits.calls_max", "autoscaler.contract.QueueLimits.bytes_max"),
    "time in the queue": ("autoscaler.contract.QueueLimits.wait_seconds_max",),
    "first byte, stall, response of an engine": (
        "autoscaler.contract.Clocks.first_byte_seconds_max",
        "autoscaler.contract.Clocks.stall_seconds_max",
        "autoscaler.contract.Clocks.response_seconds_max",
    ),
    "starts in one episode": ("autoscaler.model.Start.retries", "autoscaler.model.Start.seconds_max"),
    "a GPU that a DRA driver gives out in parts: wait for the rest of one on which another starts; emptied in one plan "
    "for who needs all of one": ("autoscaler.wholes.REST_S", "autoscaler.emptying.EMPTYING_MAX"),
    "Replicas asked for in one tick": ("autoscaler.compare.WANTS_MAX",),
    "moves of Replicas for room in pieces": ("autoscaler.defrag.EVERY_S", "autoscaler.moves.AGAIN_S"),
    "search for moves": (
        "autoscaler.defrag.KINDS_MAX",
        "autoscaler.defrag.WANTS_MAX",
        "autoscaler.defrag.PLACES_MAX",
        "autoscaler.defrag.CANDIDATES_MAX",
        "autoscaler.defrag.MOVES_MAX",
        "autoscaler.defrag.PROOFS_MAX",
    ),
    "search for a way home from capacity that costs": ("autoscaler.homeward.LEASES_MAX",),
    "search for victims who may stay": (
        "autoscaler.spared.STEPS_MAX",
        "autoscaler.ground.MOVERS_MAX",
        "autoscaler.ground.PLACES_MAX",
    ),
    "nodes that are cut anew": (
        "autoscaler.cutting.EVERY_S",
        "autoscaler.cutting.NODE_EVERY_S",
        "autoscaler.cutting.NODES_MAX",
        "autoscaler.cutting.WANTS_MAX",
        "autoscaler.cuts.CUT_S_MAX",
        "autoscaler.cuts.TRIES_MAX",
    ),
    "our configurations in mig-manager's ConfigMap": ("autoscaler.drivers.kubernetes.cutting.KEPT_MAX",),
    "sets of Tenants for which it is kept where no stranger is": ("autoscaler.trust.TRUSTS_MAX",),
    "observations that wait for a step": ("autoscaler.inbox.INBOX_MAX",),
    "what is learnt from": (
        "autoscaler.outlook.KINDS_MAX",
        "autoscaler.lessons.ALIKE_MAX",
        "autoscaler.lessons.LANES_MAX",
        "autoscaler.learning.WEIGHTS_MAX",
    ),
    "learning": (
        "pilotlight.learner_process.CPU_S_MAX",
        "pilotlight.tutor.LEARNS_S_MAX",
        "pilotlight.learner_process.MEMORY_BYTES_MAX",
        "autoscaler.lessons.AGAIN_S",
        "autoscaler.lessons.FAILED_S",
    ),
    "a what-if of what runs: its body, Calls of one Model, steps, questions at once": (
        "autoscaler.foresight.BODY_BYTES_MAX",
        "autoscaler.whatif.CALLS_MAX",
        "autoscaler.whatif.AHEAD_ROUNDS_MAX",
    ),
    "plans in one step": ("autoscaler.loop.ROUNDS_MAX",),
    "probes": ("autoscaler.drivers.probes.PROBES_PER_S_MAX", "autoscaler.drivers.probes.PROBE_SECONDS_MAX"),
    "SIGTERM to SIGKILL": ("autoscaler.compare.STOP_GRACE_S", "pilotlight.autoscaler_process.ENGINE_GRACE_S"),
    "drain": ("autoscaler.drain.DRAIN_SECONDS_MAX",),
    "log of moves": ("autoscaler.log.ROWS_MAX",),
    "starts remembered": ("autoscaler.histories.STARTS_MAX",),
    "an engine's log; logs of those that ended": (
        "autoscaler.drivers.logs.BYTES_MAX",
        "autoscaler.drivers.logs.FILES_MAX",
    ),
    "Call events on disk": ("pilotlight.eventfile.BYTES_MAX",),
    "a registry: manifest; answer of a realm; error": (
        "artifacts.manifest.MANIFEST_BYTES_MAX",
        "artifacts.tokens.TOKEN_BYTES_MAX",
        "artifacts.client.ERROR_BYTES_MAX",
    ),
    "a registry: tries in a row; waits of one request, Retry-After included; redirects": (
        "artifacts.retrying.TRIES_MAX",
        "artifacts.retrying.WAIT_S_MAX",
        "artifacts.retrying.RETRY_AFTER_S_MAX",
        "artifacts.origin.REDIRECTS_MAX",
    ),
    "a registry: tags, referrers, pages of either": (
        "artifacts.registry.TAGS_MAX",
        "artifacts.referrers.REFERRERS_MAX",
        "artifacts.registry.PAGES_MAX",
    ),
    "a fetch of weights: requests side by side; parts of a blob; a span asked for anew because it stalled": (
        "artifacts.concurrency.MOST",
        "artifacts.parts.PARTS_MAX",
        "artifacts.stalls.ANEW_MAX",
    ),
    "a credential program": ("artifacts.programs.PROGRAM_S_MAX", "artifacts.programs.PROGRAM_BYTES_MAX"),
    "a cloud's login: answer; a metadata service's connection, answer; registries with one": (
        "artifacts.clouds.cloud.ANSWER_BYTES_MAX",
        "artifacts.clouds.metadata.CONNECT_S",
        "artifacts.clouds.metadata.WHOLE_S",
        "artifacts.clouds.cloud.KEPT_MAX",
    ),
    "GGUF header": ("artifacts.gguf.HEADER_BYTES_MAX", "artifacts.gguf.KEYS_MAX", "artifacts.gguf.TENSORS_MAX"),
    "manifest of an artifact; its config; its layers; entries of an index; indexes in indexes": (
        "artifacts.manifest.MANIFEST_BYTES_MAX",
        "artifacts.manifest.CONFIG_BYTES_MAX",
        "artifacts.manifest.LAYERS_MAX",
        "artifacts.manifest.ENTRIES_MAX",
        "artifacts.platforms.INDEX_DEPTH_MAX",
    ),
    "one layer of an artifact; all together": (
        "artifacts.descriptors.BLOB_BYTES_MAX",
        "artifacts.contents.BYTES_MAX",
    ),
    "JSON from a registry": (
        "artifacts.strict_json.DEPTH_MAX",
        "artifacts.strict_json.PARTS_MAX",
        "artifacts.descriptors.ANNOTATIONS_MAX",
    ),
    "signatures of a manifest: time to find them; manifests and layers looked at, of what refers to it and of its tag "
    "each": ("artifacts.trusting.SECONDS_MAX", "artifacts.trusting.LOOKS_MAX"),
    "one signature: bundle; payload; subjects; a key's text": (
        "artifacts.bundles.BUNDLE_BYTES_MAX",
        "artifacts.claims.PAYLOAD_BYTES_MAX",
        "artifacts.claims.SUBJECTS_MAX",
        "artifacts.publickeys.PEM_BYTES_MAX",
    ),
    "a log's entry for one: body; hashes; timestamps, each; a trusted root's text, chain": (
        "artifacts.transparency.BODY_BYTES_MAX",
        "artifacts.transparency.HASHES_MAX",
        "artifacts.timestamps.TIMESTAMPS_MAX",
        "artifacts.timestamps.BYTES_MAX",
        "artifacts.trustroot.ROOT_BYTES_MAX",
        "artifacts.trustroot.CHAIN_MAX",
    ),
    "an archive in an artifact: members; names and records of one; zeros after its end": (
        "artifacts.tar.ENTRIES_MAX",
        "artifacts.tar.META_BYTES_MAX",
        "artifacts.tar.TRAILING_BYTES_MAX",
    ),
    "what is compressed: bytes out of each in; so many whatever the ratio; zstd's window": (
        "artifacts.inflate.RATIO_MAX",
        "artifacts.inflate.FREE_BYTES",
        "artifacts.inflate.WINDOW_BYTES_MAX",
    ),
    "packing: files below one folder; a Modelfile; blobs pushed at once": (
        "pilotlight.packing.FILES_MAX",
        "pilotlight.importing.FILE_BYTES_MAX",
        "artifacts.remote.AT_ONCE",
    ),
    "path of a file in an artifact": (
        "artifacts.paths.PATH_BYTES_MAX",
        "artifacts.paths.PARTS_MAX",
        "artifacts.paths.NAME_BYTES_MAX",
    ),
    "a store of weights: another process's moment with it, with one Copy; choices overtaken by a lease": (
        "artifacts.shelf.LOCK_S_MAX",
        "artifacts.shelf.LEASE_S_MAX",
        "artifacts.ledger.TRIES_MAX",
    ),
    "a store of weights: a registry's yes, the same while it is away; how many are remembered": (
        "artifacts.permits.FRESH_S",
        "artifacts.permits.AWAY_S_MAX",
        "artifacts.permits.PERMITS_MAX",
    ),
    "a store of weights: what a broken pull left": ("artifacts.shelf.LEFT_S_MAX",),
    "a node's agent: artifacts fetched at once; Copies told; what is wanted no more held": (
        "pilotlight.fetching.PULLS_MAX",
        "pilotlight.keeping.COPIES_MAX",
        "pilotlight.keeping.LINGER_S",
    ),
    "an image that an agent looks into: one span, spans of all; of a compressed layer": (
        "artifacts.inside.SPAN_BYTES",
        "artifacts.inside.SPANS_MAX",
        "artifacts.inside.BEGIN_BYTES",
    ),
    "a node's agent: artifacts looked at at once; a look that failed, or found no image, is taken again after": (
        "pilotlight.fetching.LOOKS_MAX",
        "pilotlight.keeping.LOOK_AGAIN_S",
    ),
    "a node's agent: artifacts of which it remembers what a look said; what an away registry is waited for then": (
        "pilotlight.looking.HEADERS_MAX",
        "artifacts.store.AWAY_WAIT_S",
    ),
    "an agent that is to look at an artifact: silent about it; not finding out": (
        "autoscaler.lookers.SILENT_S",
        "autoscaler.lookers.SLOW_S",
    ),
    "a node's agent: what one header says, as it is told; of all in one report": (
        "pilotlight.shapes.CHARS_MAX",
        "pilotlight.looking.HEADERS_CHARS_MAX",
    ),
    "a Model waits for what its artifact's header says of memory": ("autoscaler.compare.READ_S_MAX",),
    "a Replica waits for an agent that brings weights, for how pods can see them": (
        "autoscaler.wanted.AGENT_S_MAX",
        "autoscaler.nodesupply.LOOK_S_MAX",
    ),
    "a store of weights: files of one artifact that nobody else fetches meanwhile": ("artifacts.store.LOCKS_MAX",),
    "a store of weights: waiting for a registry that hangs, of whom it let in before": ("artifacts.store.AWAY_WAIT_S",),
    "sums of parts beside an artifact: lists that are read; one list": (
        "artifacts.chunksums.LISTS_MAX",
        "artifacts.chunksums.LIST_BYTES_MAX",
    ),
    "a store of weights: meanings of references that are remembered": ("artifacts.meanings.MEANINGS_MAX",),
    "a store of weights: Copies whose first sums are remembered, of places that say none": ("artifacts.sums.SUMS_MAX",),
    "files of a repository of the Hub, or below a key of a bucket": ("artifacts.listing.FILES_MAX",),
    "pages of the Hub's list of files, of a bucket's; rows of the Hub's before another page": (
        "artifacts.hub.PAGES_MAX",
        "artifacts.bucket.PAGES_MAX",
        "artifacts.hub.ROWS_MAX",
    ),
    "XML of S3 and STS; its elements": ("artifacts.plainxml.BYTES_MAX", "artifacts.plainxml.ELEMENTS_MAX"),
    "peers: those that one pull asks; files that a node gives at once": (
        "artifacts.peers.PEERS_MAX",
        "artifacts.serving.STREAMS_MAX",
    ),
    "agents: named to one that is about to pull; artifacts of which that is remembered, for how long": (
        "autoscaler.nodepeers.PEERS_MAX",
        "autoscaler.nodepeers.KEPT_MAX",
        "autoscaler.nodepeers.KEPT_S",
    ),
    "a peer that is busy, failed, lacks it; is fetching it": (
        "artifacts.peers.BUSY_S",
        "artifacts.peers.BUSY_S_MAX",
        "artifacts.peers.FAILED_S",
        "artifacts.peers.LACKS_S",
        "artifacts.peers.COMING_S_MAX",
    ),
    "a peer that does not read": ("artifacts.serving.STEP_BYTES", "artifacts.serving.STEP_S_MAX"),
    "an archive that peers are given out of its files: what lies beside them; its recipe": (
        "artifacts.recipes.REST_BYTES_MAX",
        "artifacts.recipes.RECIPE_BYTES_MAX",
    ),
    "header of a GGUF file in a registry": ("artifacts.headers.BYTES_MAX",),
    "names in all archives of an artifact": ("artifacts.fill.NAMES_MAX",),
    "engine images that an agent brings: at once; wanted on its node, told to it; one pull; after a failure again in": (
        "artifacts.images.PULLS_MAX",
        "artifacts.images.WANTED_MAX",
        "autoscaler.prepull.NODE_MAX",
        "artifacts.images.PULL_S_MAX",
        "artifacts.images.AGAIN_S",
        "artifacts.images.AGAIN_S_MAX",
    ),
    "a store of weights: `copy.json`": ("artifacts.layout.RECORD_BYTES_MAX",),
    "reference to an artifact": ("artifacts.reference.TEXT_CHARS_MAX", "artifacts.reference.NAME_CHARS_MAX"),
    "providers of capacity; Offers, Leases of one; orders that wait at one": (
        "autoscaler.providers.PROVIDERS_MAX",
        "autoscaler.leases.OFFERS_MAX",
        "autoscaler.leases.LISTED_MAX",
        "autoscaler.capacity.supplying.ORDERS_MAX",
    ),
    "orders of one provider that wait in a queue (ProvisioningRequests, places at Kueue)": (
        "autoscaler.capacity.provisioning.WAIT_MAX",
    ),
    "one call of a provider; a list without news, at the latest after": (
        "autoscaler.capacity.supplying.CALL_S_MAX",
        "autoscaler.capacity.supplying.LIST_S_MAX",
    ),
    "Replicas without room that one Plan looks at, kinds of them, Offers that it tries, Leases that it orders": (
        "autoscaler.deficits.WANTS_MAX",
        "autoscaler.deficits.KINDS_MAX",
        "autoscaler.trials.TRIALS_MAX",
        "autoscaler.deficits.ORDERS_MAX",
    ),
    "a Lease that no list shows; a new leader waits for a provider that is silent": (
        "autoscaler.leases.UNSEEN_S",
        "autoscaler.deficits.UNLISTED_S",
    ),
    "a fabric's Redfish service: an answer; resource blocks, pages of their list; requests at once": (
        "autoscaler.capacity.redfish_http.ANSWER_BYTES_MAX",
        "autoscaler.capacity.redfish_documents.MEMBERS_MAX",
        "autoscaler.capacity.redfish_reading.PAGES_MAX",
        "autoscaler.capacity.redfish_http.AT_ONCE",
    ),
    "what a fabric could attach, as published: devices of a node; a look without news, a sweep; a silent fabric keeps "
    "what was published before": (
        "autoscaler.pledges.PUBLISHED_MAX",
        "autoscaler.capacity.publishing.LOOK_S",
        "autoscaler.capacity.publishing.SWEEP_S",
        "autoscaler.pledges.UNKNOWN_S",
    ),
    "what was attached for a claim waits to be given to it": ("autoscaler.pledges.CLAIM_S",),
    "a fabric's Redfish service: connect, read, change; a task": (
        "autoscaler.capacity.redfish_http.CONNECT_S_MAX",
        "autoscaler.capacity.redfish_http.READ_S_MAX",
        "autoscaler.capacity.redfish_http.CHANGE_S_MAX",
        "autoscaler.capacity.redfish_http.TASK_S_MAX",
    ),
    "groups of machines that others make grow: from one look to the next, where there are any and where there are "
    "none; counted on after the last growth": (
        "autoscaler.capacity.growing.LOOK_S",
        "autoscaler.capacity.growing.NONE_S",
        "autoscaler.groups.GROW_S",
    ),
    "a GPU that a fabric attached, at its node: seen; a scan of the bus for it again; a command of the driver": (
        "artifacts.hotplug.VISIBLE_S",
        "artifacts.hotplug.SCAN_S",
        "artifacts.gpubus.COMMAND_S",
    ),
    "an attach that a fabric takes and does not do; that is tried at all; that may come after it was given back": (
        "autoscaler.capacity.redfish_bay.NOTHING_S",
        "autoscaler.capacity.redfish_bay.GIVEN_UP_S",
        "autoscaler.capacity.fabric_redfish.LATE_S",
    ),
    "kinds of Offer of which it is remembered how long they took; times of each": (
        "autoscaler.fold_capacity.KINDS_MAX",
        "autoscaler.leases.STARTS_MAX",
    ),
    "documents": ("autoscaler.strict_yaml.TEXT_CHARS_MAX",),
    "a response of the operations port, to a command": (
        "pilotlight.ops_client.BYTES_MAX",
        "pilotlight.ops_client.TIMEOUT_S",
        "pilotlight.planning.LIVE_TIMEOUT_S",
    ),
    "a line of output of a command; of a log": (
        "pilotlight.terminal.LINE_CHARACTERS_MAX",
        "pilotlight.quiet.LINE_BYTES_MAX",
    ),
    "the local driver: free space of the state directory's disk for a start; looked at": (
        "autoscaler.drivers.diskspace.BYTES_MIN",
        "autoscaler.drivers.diskspace.LOOK_S",
    ),
    "a pipe that is named as a file: silent for": ("pilotlight.files.PIPE_WAIT_S",),
    "a file of certificates; of tokens": (
        "pilotlight.certificates.TOKEN_FILE_BYTES_MAX",
        "pilotlight.certificates.TOKENS_MAX",
    ),
    "stored keys": ("pilotlight.keys.KEYS_MAX",),
}
"""Each row's first cell, and the bounds that it tells; none where it is a rule or the machine's own number."""
