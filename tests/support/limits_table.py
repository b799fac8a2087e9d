"""Rows of the table of bounds (ARCHITECTURE.md, section 11), except those of the gateway."""

from __future__ import annotations

ROWS: dict[str, tuple[str, ...]] = {
    "accept queue": ("pilotlight.net.listen.BACKLOG",),
    "queue of a Model": ("autoscaler.contract.QueueLimits.calls_max", "autoscaler.contract.QueueLimits.bytes_max"),
    "time in the queue": ("autoscaler.contract.QueueLimits.wait_seconds_max",),
    "first byte, stall, response of an engine": (
        "autoscaler.contract.Clocks.first_byte_seconds_max",
        "autoscaler.contract.Clocks.stall_seconds_max",
        "autoscaler.contract.Clocks.response_seconds_max",
    ),
    "ids, names, counts and rows in a report of a gateway; gateways": (
        "autoscaler.contract.NAME_CHARS_MAX",
        "autoscaler.contract.COUNT_MAX",
        "autoscaler.contract.ROWS_MAX",
        "autoscaler.server.gateways.GATEWAYS_MAX",
    ),
    "slots of a gateway whose process or pod nothing watches": ("autoscaler.contract.REPORT_EXPIRY_S",),
    "an object of the API server: levels of nesting; bytes; Events about unreadable objects": (
        "autoscaler.kubernetes.decoding.DEPTH_MAX",
        "autoscaler.kubernetes.decoding.BYTES_MAX",
    ),
    "starts in one episode": ("autoscaler.spec.model.Start.retries", "autoscaler.spec.model.Start.seconds_max"),
    "quarantine of a Model that caused an exception": (),
    "Models that one exception may quarantine": ("autoscaler.controller.containment.CULPRITS_MAX",),
    "a GPU that a DRA driver gives out in parts: wait for the rest of one on which another starts; emptied in one plan "
    "for who needs all of one": (
        "autoscaler.placement.partitioned_gpus.REST_S",
        "autoscaler.rearrange.vacate_gpu.EMPTYING_MAX",
    ),
    "Replicas asked for in one tick": ("autoscaler.planner.reconcile.WANTS_MAX",),
    "moves of Replicas for room in pieces": (
        "autoscaler.rearrange.defragmentation.EVERY_S",
        "autoscaler.rearrange.replica_migration.AGAIN_S",
    ),
    "search for moves": (
        "autoscaler.rearrange.defragmentation.KINDS_MAX",
        "autoscaler.rearrange.defragmentation.WANTS_MAX",
        "autoscaler.rearrange.defragmentation.PLACES_MAX",
        "autoscaler.rearrange.defragmentation.CANDIDATES_MAX",
        "autoscaler.rearrange.defragmentation.MOVES_MAX",
        "autoscaler.rearrange.defragmentation.PROOFS_MAX",
    ),
    "search for a way home from capacity that costs": ("autoscaler.rearrange.consolidation.LEASES_MAX",),
    "search for victims who may stay": (
        "autoscaler.placement.minimal_eviction.STEPS_MAX",
        "autoscaler.placement.minimal_eviction_input.MOVERS_MAX",
        "autoscaler.placement.minimal_eviction_input.PLACES_MAX",
    ),
    "MIG repartitioning of nodes": (
        "autoscaler.rearrange.mig_repartition.EVERY_S",
        "autoscaler.rearrange.mig_repartition.NODE_EVERY_S",
        "autoscaler.rearrange.mig_repartition.NODES_MAX",
        "autoscaler.rearrange.mig_repartition.WANTS_MAX",
        "autoscaler.queries.mig_status.CUT_S_MAX",
        "autoscaler.queries.mig_status.TRIES_MAX",
    ),
    "our configurations in mig-manager's ConfigMap": ("autoscaler.drivers.kubernetes.inventory.mig_manager.KEPT_MAX",),
    "sets of Tenants for which it is kept where no stranger is": (
        "autoscaler.placement.model.tenant_isolation.TRUSTS_MAX",
    ),
    "observations that wait for a step": ("autoscaler.controller.inbox.INBOX_MAX",),
    "what is learnt from": (
        "autoscaler.placement.learning.expected_demand.KINDS_MAX",
        "autoscaler.placement.learning.training.ALIKE_MAX",
        "autoscaler.placement.learning.training.LANES_MAX",
        "autoscaler.placement.learning.learner.WEIGHTS_MAX",
    ),
    "learning": (
        "pilotlight.processes.learner.CPU_S_MAX",
        "pilotlight.processes.learner_runner.LEARNS_S_MAX",
        "pilotlight.processes.learner.MEMORY_BYTES_MAX",
        "autoscaler.placement.learning.training.AGAIN_S",
        "autoscaler.placement.learning.training.FAILED_S",
    ),
    "a what-if of what runs: its body, Calls of one Model, steps, questions at once": (
        "autoscaler.server.what_if.BODY_BYTES_MAX",
        "autoscaler.planner.what_if.CALLS_MAX",
        "autoscaler.planner.what_if.AHEAD_ROUNDS_MAX",
    ),
    "plans in one step": ("autoscaler.controller.loop.ROUNDS_MAX",),
    "probes": ("autoscaler.drivers.probes.PROBES_PER_S_MAX", "autoscaler.drivers.probes.PROBE_SECONDS_MAX"),
    "SIGTERM to SIGKILL": ("autoscaler.state.lifecycle.STOP_GRACE_S", "pilotlight.processes.autoscaler.ENGINE_GRACE_S"),
    "drain": ("autoscaler.queries.gateways.DRAIN_SECONDS_MAX",),
    "log of moves": ("autoscaler.explain.decision_log.ROWS_MAX",),
    "starts remembered": ("autoscaler.demand.model_history.STARTS_MAX",),
    "an engine's log; logs of those that ended": (
        "autoscaler.drivers.local.engine_logs.BYTES_MAX",
        "autoscaler.drivers.local.engine_logs.FILES_MAX",
    ),
    "Call events on disk": ("pilotlight.net.event_file.BYTES_MAX",),
    "a registry: manifest; answer of a realm; error": (
        "artifacts.oci.manifest.MANIFEST_BYTES_MAX",
        "artifacts.registry.auth.TOKEN_BYTES_MAX",
        "artifacts.registry.client.ERROR_BYTES_MAX",
    ),
    "a registry: tries in a row; waits of one request, Retry-After included; redirects": (
        "artifacts.http.retry.TRIES_MAX",
        "artifacts.http.retry.WAIT_S_MAX",
        "artifacts.http.retry.RETRY_AFTER_S_MAX",
        "artifacts.http.origin.REDIRECTS_MAX",
    ),
    "a registry: tags, referrers, pages of either": (
        "artifacts.registry.manifests.TAGS_MAX",
        "artifacts.registry.referrers.REFERRERS_MAX",
        "artifacts.registry.manifests.PAGES_MAX",
    ),
    "a fetch of weights: requests side by side; parts of a blob; a span asked for anew because it stalled": (
        "artifacts.download.pacing.MOST",
        "artifacts.oci.spans.PARTS_MAX",
        "artifacts.download.pacing.ANEW_MAX",
    ),
    "a credential program": (
        "artifacts.credentials.credential_helpers.PROGRAM_S_MAX",
        "artifacts.credentials.credential_helpers.PROGRAM_BYTES_MAX",
    ),
    "a cloud's login: answer; a metadata service's connection, answer; registries with one": (
        "artifacts.credentials.clouds.cloud.ANSWER_BYTES_MAX",
        "artifacts.credentials.clouds.metadata.CONNECT_S",
        "artifacts.credentials.clouds.metadata.WHOLE_S",
        "artifacts.credentials.clouds.cloud.KEPT_MAX",
    ),
    "GGUF header": (
        "artifacts.formats.gguf.HEADER_BYTES_MAX",
        "artifacts.formats.gguf.KEYS_MAX",
        "artifacts.formats.gguf.TENSORS_MAX",
    ),
    "manifest of an artifact; its config; its layers; entries of an index; indexes in indexes": (
        "artifacts.oci.manifest.MANIFEST_BYTES_MAX",
        "artifacts.oci.manifest.CONFIG_BYTES_MAX",
        "artifacts.oci.manifest.LAYERS_MAX",
        "artifacts.oci.manifest.ENTRIES_MAX",
        "artifacts.oci.manifest.INDEX_DEPTH_MAX",
    ),
    "one layer of an artifact; all together": (
        "artifacts.oci.descriptor.BLOB_BYTES_MAX",
        "artifacts.dialects.contents.BYTES_MAX",
    ),
    "JSON from a registry": (
        "artifacts.oci.strict_json.DEPTH_MAX",
        "artifacts.oci.strict_json.PARTS_MAX",
        "artifacts.oci.descriptor.ANNOTATIONS_MAX",
    ),
    "signatures of a manifest: time to find them; manifests and layers looked at, of what refers to it and of its tag "
    "each": ("artifacts.fetch.verify_signatures.SECONDS_MAX", "artifacts.fetch.verify_signatures.LOOKS_MAX"),
    "one signature: bundle; payload; subjects; a key's text": (
        "artifacts.signatures.bundles.BUNDLE_BYTES_MAX",
        "artifacts.signatures.payloads.PAYLOAD_BYTES_MAX",
        "artifacts.signatures.payloads.SUBJECTS_MAX",
        "artifacts.signatures.public_keys.PEM_BYTES_MAX",
    ),
    "a log's entry for one: body; hashes; timestamps, each; a trusted root's text, chain": (
        "artifacts.signatures.transparency_log.BODY_BYTES_MAX",
        "artifacts.signatures.transparency_log.HASHES_MAX",
        "artifacts.signatures.timestamps.TIMESTAMPS_MAX",
        "artifacts.signatures.timestamps.BYTES_MAX",
        "artifacts.signatures.trust_root.ROOT_BYTES_MAX",
        "artifacts.signatures.trust_root.CHAIN_MAX",
    ),
    "an archive in an artifact: members; names and records of one; zeros after its end": (
        "artifacts.archives.tar.ENTRIES_MAX",
        "artifacts.archives.tar.META_BYTES_MAX",
        "artifacts.archives.tar.TRAILING_BYTES_MAX",
    ),
    "what is compressed: bytes out of each in; so many whatever the ratio; zstd's window": (
        "artifacts.archives.decompress.RATIO_MAX",
        "artifacts.archives.decompress.FREE_BYTES",
        "artifacts.archives.decompress.WINDOW_BYTES_MAX",
    ),
    "packing: files below one folder; a Modelfile; blobs pushed at once": (
        "pilotlight.cli.weights.pack.FILES_MAX",
        "pilotlight.cli.import_.FILE_BYTES_MAX",
        "artifacts.pack.push_artifact.AT_ONCE",
    ),
    "path of a file in an artifact": (
        "artifacts.safe_paths.PATH_BYTES_MAX",
        "artifacts.safe_paths.PARTS_MAX",
        "artifacts.safe_paths.NAME_BYTES_MAX",
    ),
    "a store of weights: another process's moment with it, with one Copy; choices overtaken by a lease": (
        "artifacts.store.copies.LOCK_S_MAX",
        "artifacts.store.copies.LEASE_S_MAX",
        "artifacts.store.reservations.TRIES_MAX",
    ),
    "a store of weights: a registry's yes, the same while it is away; how many are remembered": (
        "artifacts.store.permission_cache.FRESH_S",
        "artifacts.store.permission_cache.AWAY_S_MAX",
        "artifacts.store.permission_cache.PERMITS_MAX",
    ),
    "a store of weights: what a broken pull left": ("artifacts.store.copies.LEFT_S_MAX",),
    "a node's agent: artifacts fetched at once; Copies told; what is wanted no more held": (
        "pilotlight.agent.weights.fetch.PULLS_MAX",
        "pilotlight.agent.weights.keeper.COPIES_MAX",
        "pilotlight.agent.weights.keeper.LINGER_S",
    ),
    "an image that an agent looks into: one span, spans of all; of a compressed layer": (
        "artifacts.fetch.inspect_image.SPAN_BYTES",
        "artifacts.fetch.inspect_image.SPANS_MAX",
        "artifacts.fetch.inspect_image.BEGIN_BYTES",
    ),
    "a node's agent: artifacts looked at at once; a look that failed, or found no image, is taken again after": (
        "pilotlight.agent.weights.fetch.LOOKS_MAX",
        "pilotlight.agent.weights.keeper.LOOK_AGAIN_S",
    ),
    "a node's agent: artifacts of which it remembers what a look said; what an away registry is waited for then": (
        "pilotlight.agent.weights.inspect.HEADERS_MAX",
        "artifacts.store.store.AWAY_WAIT_S",
    ),
    "an agent that is to look at an artifact: silent about it; not finding out": (
        "autoscaler.weights.inspection.SILENT_S",
        "autoscaler.weights.inspection.SLOW_S",
    ),
    "a node's agent: what one header says, as it is told; of all in one report": (
        "pilotlight.models.remote_header.CHARS_MAX",
        "pilotlight.agent.weights.inspect.HEADERS_CHARS_MAX",
    ),
    "a Model waits for what its artifact's header says of memory": ("autoscaler.planner.reconcile.READ_S_MAX",),
    "a Replica waits for an agent that brings weights, for how pods can see them": (
        "autoscaler.weights.desired.AGENT_S_MAX",
        "autoscaler.controller.weights_wait.LOOK_S_MAX",
    ),
    "a store of weights: files of one artifact that nobody else fetches meanwhile": (
        "artifacts.store.store.LOCKS_MAX",
    ),
    "a store of weights: waiting for a registry that hangs, of whom it let in before": (
        "artifacts.store.store.AWAY_WAIT_S",
    ),
    "sums of parts beside an artifact: lists that are read; one list": (
        "artifacts.pack.chunk_sums.LISTS_MAX",
        "artifacts.pack.chunk_sums.LIST_BYTES_MAX",
    ),
    "a store of weights: meanings of references that are remembered": ("artifacts.store.tag_cache.MEANINGS_MAX",),
    "a store of weights: Copies whose first sums are remembered, of places that say none": (
        "artifacts.sources.learned_sums.SUMS_MAX",
    ),
    "files of a repository of the Hub, or below a key of a bucket": ("artifacts.dialects.file_listing.FILES_MAX",),
    "pages of the Hub's list of files, of a bucket's; rows of the Hub's before another page": (
        "artifacts.sources.huggingface.PAGES_MAX",
        "artifacts.sources.s3.PAGES_MAX",
        "artifacts.sources.huggingface.ROWS_MAX",
    ),
    "XML of S3 and STS; its elements": ("artifacts.http.xml.BYTES_MAX", "artifacts.http.xml.ELEMENTS_MAX"),
    "peers: those that one pull asks; files that a node gives at once": (
        "artifacts.peers.selection.PEERS_MAX",
        "artifacts.peers.server.STREAMS_MAX",
    ),
    "agents: named to one that is about to pull; artifacts of which that is remembered, for how long": (
        "autoscaler.weights.peers.PEERS_MAX",
        "autoscaler.weights.peers.KEPT_MAX",
        "autoscaler.weights.peers.KEPT_S",
    ),
    "a peer that is busy, failed, lacks it; is fetching it": (
        "artifacts.peers.selection.BUSY_S",
        "artifacts.peers.selection.BUSY_S_MAX",
        "artifacts.peers.selection.FAILED_S",
        "artifacts.peers.selection.LACKS_S",
        "artifacts.peers.selection.COMING_S_MAX",
    ),
    "a peer that does not read": ("artifacts.peers.server.STEP_BYTES", "artifacts.peers.server.STEP_S_MAX"),
    "an archive that peers are given out of its files: what lies beside them; its recipe": (
        "artifacts.archives.reassembly.REST_BYTES_MAX",
        "artifacts.archives.reassembly.RECIPE_BYTES_MAX",
    ),
    "header of a GGUF file in a registry": ("artifacts.fetch.remote_header.BYTES_MAX",),
    "names in all archives of an artifact": ("artifacts.fetch.blobs.NAMES_MAX",),
    "engine images that an agent brings: at once; wanted on its node, told to it; one pull; after a failure again in": (
        "pilotlight.agent.kubelet.image_pull.PULLS_MAX",
        "pilotlight.agent.kubelet.image_pull.WANTED_MAX",
        "autoscaler.weights.image_prepull.NODE_MAX",
        "pilotlight.agent.kubelet.image_pull.PULL_S_MAX",
        "pilotlight.agent.kubelet.image_pull.AGAIN_S",
        "pilotlight.agent.kubelet.image_pull.AGAIN_S_MAX",
    ),
    "a store of weights: `copy.json`": ("artifacts.store.layout.RECORD_BYTES_MAX",),
    "reference to an artifact": ("artifacts.reference.TEXT_CHARS_MAX", "artifacts.reference.NAME_CHARS_MAX"),
    "providers of capacity; Offers, Leases of one; orders that wait at one": (
        "autoscaler.spec.capacity.PROVIDERS_MAX",
        "autoscaler.state.capacity_orders.OFFERS_MAX",
        "autoscaler.state.capacity_orders.LISTED_MAX",
        "autoscaler.providers.runner.ORDERS_MAX",
    ),
    "orders of one provider that wait in a queue (ProvisioningRequests, places at Kueue)": (
        "autoscaler.providers.provisioning_request.provider.WAIT_MAX",
    ),
    "one call of a provider; a list without news, at the latest after": (
        "autoscaler.providers.runner.CALL_S_MAX",
        "autoscaler.providers.runner.LIST_S_MAX",
    ),
    "Replicas without room that one Plan looks at, kinds of them, Offers that it tries, Leases that it orders": (
        "autoscaler.provisioning.provisioner.WANTS_MAX",
        "autoscaler.provisioning.provisioner.KINDS_MAX",
        "autoscaler.provisioning.offer_selection.TRIALS_MAX",
        "autoscaler.provisioning.provisioner.ORDERS_MAX",
    ),
    "a Lease that no list shows; a new leader waits for a provider that is silent": (
        "autoscaler.state.capacity_orders.UNSEEN_S",
        "autoscaler.provisioning.provisioner.UNLISTED_S",
    ),
    "a fabric's Redfish service: an answer; resource blocks, pages of their list; requests at once": (
        "autoscaler.providers.redfish.client.ANSWER_BYTES_MAX",
        "autoscaler.providers.redfish.schema.MEMBERS_MAX",
        "autoscaler.providers.redfish.inventory.PAGES_MAX",
        "autoscaler.providers.redfish.client.AT_ONCE",
    ),
    "what a fabric could attach, as published: devices of a node; a look without news, a sweep; a silent fabric keeps "
    "what was published before": (
        "autoscaler.provisioning.device_claims.PUBLISHED_MAX",
        "autoscaler.providers.redfish.dra_publisher.LOOK_S",
        "autoscaler.providers.redfish.dra_publisher.SWEEP_S",
        "autoscaler.provisioning.device_claims.UNKNOWN_S",
    ),
    "what was attached for a claim waits to be given to it": ("autoscaler.provisioning.device_claims.CLAIM_S",),
    "a fabric's Redfish service: connect, read, change; a task": (
        "autoscaler.providers.redfish.client.CONNECT_S_MAX",
        "autoscaler.providers.redfish.client.READ_S_MAX",
        "autoscaler.providers.redfish.client.CHANGE_S_MAX",
        "autoscaler.providers.redfish.client.TASK_S_MAX",
    ),
    "groups of machines that others make grow: from one look to the next, where there are any and where there are "
    "none; counted on after the last growth": (
        "autoscaler.providers.machine_groups.LOOK_S",
        "autoscaler.providers.machine_groups.NONE_S",
        "autoscaler.capacity.machine_groups.GROW_S",
    ),
    "a GPU that a fabric attached, at its node: seen; a scan of the bus for it again; a command of the driver": (
        "pilotlight.agent.gpu.hotplug.VISIBLE_S",
        "pilotlight.agent.gpu.hotplug.SCAN_S",
        "pilotlight.agent.gpu.bus.COMMAND_S",
    ),
    "an attach that a fabric takes and does not do; that is tried at all; that may come after it was given back": (
        "autoscaler.providers.redfish.system_writer.NOTHING_S",
        "autoscaler.providers.redfish.system_writer.GIVEN_UP_S",
        "autoscaler.providers.redfish.provider.LATE_S",
    ),
    "kinds of Offer of which it is remembered how long they took; times of each": (
        "autoscaler.fold.capacity.KINDS_MAX",
        "autoscaler.state.capacity_orders.STARTS_MAX",
    ),
    "documents": ("autoscaler.spec.yaml.TEXT_CHARS_MAX",),
    "a response of the operations port, to a command": (
        "pilotlight.net.ops_client.BYTES_MAX",
        "pilotlight.net.ops_client.TIMEOUT_S",
        "pilotlight.cli.plan.LIVE_TIMEOUT_S",
    ),
    "a line of output of a command; of a log": (
        "pilotlight.output.LINE_CHARACTERS_MAX",
        "pilotlight.output.LINE_BYTES_MAX",
    ),
    "the local driver: free space of the state directory's disk for a start; looked at": (
        "autoscaler.drivers.local.disk_space.BYTES_MIN",
        "autoscaler.drivers.local.disk_space.LOOK_S",
    ),
    "a pipe that is named as a file: silent for": ("pilotlight.net.files.PIPE_WAIT_S",),
    "a file of certificates; of tokens": (
        "pilotlight.net.certificates.TOKEN_FILE_BYTES_MAX",
        "pilotlight.net.certificates.TOKENS_MAX",
    ),
    "stored keys": ("pilotlight.cli.keys.KEYS_MAX",),
}
"""Each row's first cell, and the bounds that it states; none if it is a rule or the machine's own number."""
