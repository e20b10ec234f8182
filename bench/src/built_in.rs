//! The experiments that are part of the binary.

use crate::experiment::Experiment;
use anyhow::Result;

/// All of the project.
pub fn all() -> Result<Vec<Experiment>> {
    const FILES: &[&str] = &[
        include_str!("../experiments/cluster/decide.toml"),
        include_str!("../experiments/cluster/fig46.toml"),
        include_str!("../experiments/cluster/fig47.toml"),
        include_str!("../experiments/cluster/fig48.toml"),
        include_str!("../experiments/cluster/fig49.toml"),
        include_str!("../experiments/cluster/policies.toml"),
        include_str!("../experiments/cluster/real.toml"),
        include_str!("../experiments/cluster/reference.toml"),
        include_str!("../experiments/cluster/speed.toml"),
        include_str!("../experiments/cluster/table42.toml"),
        include_str!("../experiments/cluster/traces.toml"),
        include_str!("../experiments/gc/beside.toml"),
        include_str!("../experiments/gc/build.toml"),
        include_str!("../experiments/gc/cache.toml"),
        include_str!("../experiments/gc/follow.toml"),
        include_str!("../experiments/gc/gcbench.toml"),
        include_str!("../experiments/gc/graph.toml"),
        include_str!("../experiments/gc/graphs.toml"),
        include_str!("../experiments/gc/libraries.toml"),
        include_str!("../experiments/gc/maps.toml"),
        include_str!("../experiments/gc/marking.toml"),
        include_str!("../experiments/gc/moves.toml"),
        include_str!("../experiments/gc/near.toml"),
        include_str!("../experiments/gc/programs.toml"),
        include_str!("../experiments/gc/regions.toml"),
        include_str!("../experiments/gc/replace.toml"),
        include_str!("../experiments/gc/servers.toml"),
        include_str!("../experiments/gc/table.toml"),
        include_str!("../experiments/gc/trees.toml"),
        include_str!("../experiments/aifm/hot.toml"),
        include_str!("../experiments/aifm/scan.toml"),
        include_str!("../experiments/aifm/cold.toml"),
        include_str!("../experiments/aifm/compute.toml"),
        include_str!("../experiments/aifm/zipf.toml"),
        include_str!("../experiments/aifm/zipf-many.toml"),
        include_str!("../experiments/aifm/hash-near.toml"),
        include_str!("../experiments/aifm/hash-near-many.toml"),
        include_str!("../experiments/aifm/web.toml"),
        include_str!("../experiments/aifm/web-latency.toml"),
        include_str!("../experiments/aifm/remote.toml"),
        include_str!("../experiments/aifm/misses.toml"),
        include_str!("../experiments/aifm/late.toml"),
        include_str!("../experiments/aifm/window.toml"),
        include_str!("../experiments/aifm/hash-threads.toml"),
        include_str!("../experiments/aifm/pack.toml"),
        include_str!("../experiments/aifm/unpack.toml"),
        include_str!("../experiments/aifm/frame.toml"),
        include_str!("../experiments/aifm/fig7.toml"),
        include_str!("../experiments/aifm/sql.toml"),
        include_str!("../experiments/aifm/fig8.toml"),
        include_str!("../experiments/aifm/churn.toml"),
        include_str!("../experiments/aifm/crowd.toml"),
        include_str!("../experiments/aifm/overhead.toml"),
        include_str!("../experiments/atlas/latency.toml"),
        include_str!("../experiments/atlas/workloads.toml"),
        include_str!("../experiments/atlas/car.toml"),
        include_str!("../experiments/atlas/hotness.toml"),
        include_str!("../experiments/atlas/overhead.toml"),
        include_str!("../experiments/atlas/tcp.toml"),
        include_str!("../experiments/atlas/paths.toml"),
        include_str!("../experiments/atlas/real.toml"),
        include_str!("../experiments/dmswitcher/slo.toml"),
        include_str!("../experiments/dmswitcher/select.toml"),
        include_str!("../experiments/dmswitcher/ssd.toml"),
        include_str!("../experiments/dmswitcher/lz.toml"),
        include_str!("../experiments/dmswitcher/ec.toml"),
        include_str!("../experiments/dmswitcher/switch.toml"),
        include_str!("../experiments/dmswitcher/wall.toml"),
        include_str!("../experiments/dmswitcher/channels.toml"),
        include_str!("../experiments/dmswitcher/adapt.toml"),
        include_str!("../experiments/dmswitcher/fabric.toml"),
        include_str!("../experiments/dmswitcher/thp.toml"),
        include_str!("../experiments/paging/policies.toml"),
        include_str!("../experiments/paging/calls.toml"),
        include_str!("../experiments/paging/random.toml"),
        include_str!("../experiments/paging/random-near.toml"),
        include_str!("../experiments/paging/scan.toml"),
        include_str!("../experiments/paging/scan-near.toml"),
        include_str!("../experiments/paging/stream.toml"),
        include_str!("../experiments/paging/quicksort.toml"),
        include_str!("../experiments/paging/kmeans.toml"),
        include_str!("../experiments/paging/linpack.toml"),
        include_str!("../experiments/paging/overhead.toml"),
        include_str!("../experiments/paging/people.toml"),
        include_str!("../experiments/paging/threads.toml"),
        include_str!("../experiments/paging/traces.toml"),
        include_str!("../experiments/paging/write.toml"),
        include_str!("../experiments/python/frame.toml"),
        include_str!("../experiments/python/jobs.toml"),
        include_str!("../experiments/python/near.toml"),
        include_str!("../experiments/python/spill.toml"),
        include_str!("../experiments/front/web.toml"),
        include_str!("../experiments/serving/tenants.toml"),
        include_str!("../experiments/serving/tls.toml"),
        include_str!("../experiments/share/affinity.toml"),
        include_str!("../experiments/share/counts.toml"),
        include_str!("../experiments/share/deref.toml"),
        include_str!("../experiments/share/fixed.toml"),
        include_str!("../experiments/share/kv.toml"),
        include_str!("../experiments/share/lock.toml"),
        include_str!("../experiments/share/one.toml"),
        include_str!("../experiments/share/read.toml"),
        include_str!("../experiments/share/real.toml"),
        include_str!("../experiments/share/recover.toml"),
        include_str!("../experiments/share/scale.toml"),
        include_str!("../experiments/share/social.toml"),
        include_str!("../experiments/share/steal.toml"),
        include_str!("../experiments/wickit/list.toml"),
        include_str!("../experiments/wickit/map-far-index.toml"),
        include_str!("../experiments/wickit/latency.toml"),
        include_str!("../experiments/wickit/client.toml"),
        include_str!("../experiments/wickit/plain.toml"),
        include_str!("../experiments/wickit/shift.toml"),
        include_str!("../experiments/wickit/walk.toml"),
        include_str!("../experiments/wickit/log.toml"),
        include_str!("../experiments/wickit/cuckoo.toml"),
    ];
    FILES.iter().map(|text| Experiment::parse(text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_files_parse_and_have_different_names() {
        let experiments = all().unwrap();
        let mut names: Vec<_> = experiments.iter().map(|e| e.name.clone()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), experiments.len());
        let families = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/experiments")).unwrap();
        let files = families.map(|family| std::fs::read_dir(family.unwrap().path()).unwrap().count());
        assert_eq!(files.sum::<usize>(), experiments.len(), "a file is not built in");
    }
}
