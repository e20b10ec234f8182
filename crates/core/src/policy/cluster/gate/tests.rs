//! Guards against a node or a pool that is promised twice, books that say less than is used, and a
//! job that waits for ever.

use super::*;

fn node(cores: u32, memory_bytes: u64) -> GateNode {
    let shape = NodeShape { cores, reclaim_cores: 0, memory_bytes };
    GateNode { shape, foreign_cores: 0, foreign_bytes: 0, is_up: true }
}

fn job(memory_bytes: u64, least_bytes: u64, phase: GatePhase) -> GateJob {
    GateJob { class: GateJob::class(1, memory_bytes, least_bytes).unwrap(), phase, waited_s: 0 }
}

fn rules(pool_bytes: u64) -> GateRules {
    GateRules {
        pool_bytes: Some(pool_bytes),
        servers: PoolServers::UNKNOWN,
        start_within_s: 30,
        overtake_within_s: 3600,
    }
}

fn running(memory: u64, least: u64, far_bytes: u64) -> GateJob {
    job(memory, least, GatePhase::Running { node: 0, far_bytes })
}

fn waiting(memory: u64, least: u64) -> GateJob {
    job(memory, least, GatePhase::Waiting)
}

#[test]
fn jobs_are_admitted_near_first_and_then_far_until_the_pool_is_promised() {
    let jobs = [waiting(80, 40), waiting(80, 40), waiting(80, 40), waiting(80, 40), waiting(20, 20)];
    let decisions = decide(&[node(8, 100), node(8, 100)], &jobs, rules(100));
    let expected = [
        GateDecision::Admit { job: 0, node: 0, far_bytes: 0 },
        GateDecision::Admit { job: 1, node: 1, far_bytes: 0 },
        GateDecision::Admit { job: 2, node: 0, far_bytes: 60 },
        // After all admissions: 80 where nothing near is left, and 40 of the pool are.
        GateDecision::Wait { job: 3, reason: GateWait::Far { missing_bytes: 40 } },
        GateDecision::Admit { job: 4, node: 1, far_bytes: 0 },
    ];
    assert_eq!(decisions, expected);
}

#[test]
fn what_servers_store_counts_where_it_is_more_than_what_was_promised() {
    // 40 of a pool of 100 are promised to a job that runs, 30 to one that has not started.
    let admitted = job(30, 10, GatePhase::Admitted { node: 0, far_bytes: 30, age_s: 1 });
    let jobs = [running(140, 60, 40), admitted, waiting(20, 10), waiting(20, 10)];
    let last = |stored_bytes, capacity_bytes| {
        let servers = PoolServers { stored_bytes, capacity_bytes };
        let decisions = decide(&[node(8, 100)], &jobs, GateRules { servers, ..rules(100) });
        [decisions[decisions.len() - 2], decisions[decisions.len() - 1]]
    };
    let lacks = |job, missing_bytes| GateDecision::Wait { job, reason: GateWait::Far { missing_bytes } };
    let starts = GateDecision::Admit { job: 2, node: 0, far_bytes: 20 };
    for stored in [0u64, 39, 40, 50] {
        let missing = 10 + stored.saturating_sub(40);
        assert_eq!(last(stored, 100), [starts, lacks(3, missing)], "{stored}");
        assert_eq!(last(100 + stored, 1000), [starts, lacks(3, 10)], "the servers have room, and the pool is promised");
    }
    assert_eq!(last(51, 100), [lacks(2, 1), lacks(3, 1)], "one byte too many is stored");
    assert_eq!(last(0, 89), [lacks(2, 1), lacks(3, 1)], "the servers are smaller than the pool");
    assert_eq!(last(u64::MAX, 100), [lacks(2, 20), lacks(3, 20)]);
    let full = PoolServers { stored_bytes: 7000, capacity_bytes: 7000 };
    let near = decide(&[node(8, 100)], &[waiting(100, 100)], GateRules { servers: full, ..rules(100) });
    assert_eq!(near, [GateDecision::Admit { job: 0, node: 0, far_bytes: 0 }], "a job that is all near needs no pool");
}

#[test]
fn every_reason_to_wait_is_said() {
    let check = |node: GateNode, jobs: &[GateJob], rules: GateRules, reason: GateWait| {
        let last = jobs.len() - 1;
        let decisions = decide(&[node], jobs, rules);
        assert_eq!(decisions.last(), Some(&GateDecision::Wait { job: last, reason }), "{decisions:?}");
    };
    let free = node(4, 100);
    check(free, &[waiting(201, 50)], rules(100), GateWait::Never);
    check(free, &[waiting(150, 101)], rules(100), GateWait::Never);
    check(free, &[running(60, 60, 0), waiting(80, 50)], rules(100), GateWait::Near { missing_bytes: 10 });
    check(free, &[running(100, 10, 0), waiting(80, 50)], rules(70), GateWait::Far { missing_bytes: 10 });
    check(GateNode { foreign_cores: 4, ..free }, &[waiting(10, 10)], rules(100), GateWait::Cores);
    check(GateNode { is_up: false, ..free }, &[waiting(10, 10)], rules(100), GateWait::Cores);
    check(GateNode { foreign_bytes: 70, ..free }, &[waiting(50, 40)], rules(100), GateWait::Near { missing_bytes: 10 });
    check(free, &[waiting(10, 10)], GateRules { pool_bytes: None, ..rules(0) }, GateWait::Pool);
    check(free, &[job(10, 10, GatePhase::Held)], rules(100), GateWait::Held);
    let admitted = |age_s| job(10, 10, GatePhase::Admitted { node: 0, far_bytes: 0, age_s });
    check(free, &[admitted(29)], rules(100), GateWait::Starting);
    assert_eq!(decide(&[free], &[admitted(30)], rules(100)), [GateDecision::Withdraw { job: 0 }]);
    let down = GateNode { is_up: false, ..free };
    assert_eq!(decide(&[down], &[admitted(0)], rules(100)), [GateDecision::Withdraw { job: 0 }], "not there");
}

#[test]
fn a_job_that_has_waited_long_is_overtaken_by_none_unless_it_can_never_start() {
    let patient = |waited_s, memory, least| GateJob { waited_s, ..waiting(memory, least) };
    let admits = |first: GateJob| {
        let jobs = [running(50, 50, 0), first, waiting(10, 10)];
        decide(&[node(4, 100)], &jobs, rules(100)).contains(&GateDecision::Admit { job: 2, node: 0, far_bytes: 0 })
    };
    assert!(admits(patient(3599, 60, 60)));
    assert!(!admits(patient(3600, 60, 60)));
    assert!(admits(patient(3600, 300, 60)));
    assert!(admits(GateJob { waited_s: 9999, ..job(60, 60, GatePhase::Held) }));
}

#[test]
fn books_follow_the_overflow_when_jobs_end() {
    // The first of three has ended.
    let jobs = [running(80, 30, 60), running(80, 30, 80)];
    assert_eq!(decide(&[node(4, 100)], &jobs, rules(200)), [GateDecision::Charge { job: 1, far_bytes: 0 }]);
    let jobs = [running(80, 30, 0)];
    assert_eq!(decide(&[node(4, 100)], &jobs, rules(200)), []);
    // Books of nonsense, as after a job was started by hand.
    let jobs = [running(80, 30, 0), running(80, 30, 0), running(80, 30, u64::MAX)];
    assert_eq!(
        decide(&[node(4, 100)], &jobs, rules(200)),
        [GateDecision::Charge { job: 2, far_bytes: 80 }, GateDecision::Charge { job: 1, far_bytes: 60 }]
    );
}

/// Scheduler that starts what was admitted, sooner or later, as its own books allow.
struct ModelScheduler {
    nodes: Vec<GateNode>,
    pool_bytes: u64,
    jobs: Vec<GateJob>,
}

impl ModelScheduler {
    fn charged_bytes(&self) -> u64 {
        let far = |job: &GateJob| match job.phase {
            GatePhase::Running { far_bytes, .. } => far_bytes,
            _ => 0,
        };
        self.jobs.iter().map(far).sum()
    }

    fn on(&self, at: usize) -> impl Iterator<Item = &GateJob> {
        self.jobs.iter().filter(move |job| matches!(job.phase, GatePhase::Running { node, .. } if node == at))
    }

    /// Starts an admitted job if cores, near memory and licences are there.
    fn start(&mut self, index: usize) {
        let GatePhase::Admitted { node, far_bytes, .. } = self.jobs[index].phase else { return };
        let (shape, class) = (self.nodes[node], &self.jobs[index].class);
        let least: u64 = self.on(node).map(|job| job.class.least_bytes()).sum();
        let cores: u32 = self.on(node).map(|job| job.class.cores()).sum();
        let fits = self.charged_bytes() + far_bytes <= self.pool_bytes
            && shape.is_up
            && least + class.least_bytes() + shape.foreign_bytes <= shape.shape.memory_bytes
            && cores + class.cores() + shape.foreign_cores <= shape.shape.cores;
        if fits {
            self.jobs[index].phase = GatePhase::Running { node, far_bytes };
        }
    }

    fn apply(&mut self, decision: GateDecision) {
        match decision {
            GateDecision::Charge { job, far_bytes } => {
                let GatePhase::Running { node, far_bytes: before } = self.jobs[job].phase else {
                    panic!("{decision:?}")
                };
                // More than there is changes nothing and says nothing.
                if self.charged_bytes() - before + far_bytes <= self.pool_bytes {
                    self.jobs[job].phase = GatePhase::Running { node, far_bytes };
                }
            }
            GateDecision::Withdraw { job } => self.jobs[job].phase = GatePhase::Waiting,
            GateDecision::Admit { job, node, far_bytes } => {
                assert_eq!(self.jobs[job].phase, GatePhase::Waiting);
                self.jobs[job].phase = GatePhase::Admitted { node, far_bytes, age_s: 0 };
            }
            GateDecision::Wait { .. } => {}
        }
    }
}

#[test]
fn random_histories_promise_nothing_twice_and_every_job_starts_in_the_end() {
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let nodes = (0..1 + random.usize(..4)).map(|_| node(2 + random.u32(..6), 60 + random.u64(..100))).collect();
        let mut model = ModelScheduler { nodes, pool_bytes: random.u64(..300), jobs: Vec::new() };
        for round in 0..400 {
            let is_last = round >= 150;
            for job in &mut model.jobs {
                job.waited_s += 60;
                if let GatePhase::Admitted { age_s, .. } = &mut job.phase {
                    *age_s += 5;
                }
            }
            match random.u8(..8) {
                0..=2 if !is_last => {
                    let memory = 1 + random.u64(..150);
                    let class = GateJob::class(1 + random.u32(..3), memory, 1 + random.u64(..memory)).unwrap();
                    model.jobs.push(GateJob { class, phase: GatePhase::Waiting, waited_s: 0 });
                }
                3 if !model.jobs.is_empty() => {
                    // It ends, is cancelled, or is requeued with what it had.
                    let index = random.usize(..model.jobs.len());
                    match model.jobs[index].phase {
                        GatePhase::Running { node, far_bytes } if random.bool() => {
                            model.jobs[index].phase = GatePhase::Admitted { node, far_bytes, age_s: 1000 };
                        }
                        _ => drop(model.jobs.remove(index)),
                    }
                }
                4 if !is_last => {
                    let index = random.usize(..model.nodes.len());
                    model.nodes[index].is_up = random.bool();
                }
                5 if !is_last => {
                    // A foreign job comes where there is room, or goes.
                    let index = random.usize(..model.nodes.len());
                    let least: u64 = model.on(index).map(|job| job.class.least_bytes()).sum();
                    let free = model.nodes[index].shape.memory_bytes.saturating_sub(least);
                    model.nodes[index].foreign_bytes = random.u64(..=free);
                }
                _ => {}
            }
            if is_last {
                for node in &mut model.nodes {
                    (node.is_up, node.foreign_bytes) = (true, 0);
                }
            }
            let rules = GateRules {
                start_within_s: 30,
                overtake_within_s: 600,
                pool_bytes: Some(model.pool_bytes),
                servers: PoolServers::UNKNOWN,
            };
            // A gate that is killed has applied only the first of its decisions.
            let decisions = decide(&model.nodes, &model.jobs, rules);
            let applied = if random.u8(..4) == 0 { random.usize(..=decisions.len()) } else { decisions.len() };
            for &decision in &decisions[..applied] {
                model.apply(decision);
            }
            for index in 0..model.jobs.len() {
                if is_last || random.bool() {
                    model.start(index);
                }
            }
            assert!(model.charged_bytes() <= model.pool_bytes, "seed {seed}, round {round}");
            if is_last {
                // Jobs that run end at some time.
                let ends = model.jobs.iter().position(|job| matches!(job.phase, GatePhase::Running { .. }));
                if let Some(index) = ends.filter(|_| random.bool()) {
                    model.jobs.remove(index);
                }
            }
        }
        let rules = GateRules {
            start_within_s: 30,
            overtake_within_s: 600,
            pool_bytes: Some(model.pool_bytes),
            servers: PoolServers::UNKNOWN,
        };
        for decision in decide(&model.nodes, &model.jobs, rules) {
            let is_impossible = matches!(decision, GateDecision::Wait { reason: GateWait::Never, .. });
            assert!(is_impossible, "seed {seed}: {decision:?} of {:?}", model.jobs);
        }
    }
}

#[test]
fn books_are_never_below_the_overflow_without_strange_jobs() {
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(1000 + seed);
        let nodes: Vec<GateNode> = (0..1 + random.usize(..3)).map(|_| node(8, 60 + random.u64(..100))).collect();
        let mut model = ModelScheduler { nodes, pool_bytes: random.u64(..300), jobs: Vec::new() };
        for round in 0..200 {
            if random.bool() {
                let memory = 1 + random.u64(..150);
                model.jobs.push(waiting(memory, 1 + random.u64(..memory)));
            } else if !model.jobs.is_empty() {
                model.jobs.remove(random.usize(..model.jobs.len()));
            }
            let decisions = decide(&model.nodes, &model.jobs, rules(model.pool_bytes));
            let applied = if random.bool() { decisions.len() } else { random.usize(..=decisions.len()) };
            for &decision in &decisions[..applied] {
                model.apply(decision);
            }
            for index in 0..model.jobs.len() {
                model.start(index);
            }
            let mut overflow = 0;
            for (index, node) in model.nodes.iter().enumerate() {
                let asked: u64 = model.on(index).map(|job| job.class.memory_bytes()).sum();
                overflow += asked.saturating_sub(node.shape.memory_bytes);
            }
            assert!(overflow <= model.charged_bytes(), "seed {seed}, round {round}: the pool is used and free");
        }
    }
}

#[test]
fn an_offer_is_what_would_be_decided_about_the_first_job_that_waits() {
    let mut offers = 0;
    for seed in 0..2000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let count = 1 + random.usize(..5);
        let mut nodes: Vec<GateNode> = (0..count).map(|_| node(2 + random.u32(..8), 60 + random.u64(..100))).collect();
        for node in &mut nodes {
            (node.is_up, node.foreign_bytes) = (random.u8(..8) > 0, random.u64(..60));
        }
        let jobs: Vec<GateJob> = (0..random.usize(..12))
            .map(|_| {
                let memory = 1 + random.u64(..150);
                let phase = match random.u8(..4) {
                    0 => GatePhase::Waiting,
                    1 => GatePhase::Held,
                    _ => GatePhase::Running { node: random.usize(..count), far_bytes: 0 },
                };
                GateJob { waited_s: random.u64(..7200), ..job(memory, 1 + random.u64(..memory), phase) }
            })
            .collect();
        let servers = match random.bool() {
            true => PoolServers::UNKNOWN,
            false => PoolServers { stored_bytes: random.u64(..100), capacity_bytes: random.u64(..200) },
        };
        let rules = GateRules { pool_bytes: (random.u8(..16) > 0).then(|| random.u64(..200)), servers, ..rules(0) };
        let Some(first) = jobs.iter().position(|job| job.phase == GatePhase::Waiting) else { continue };
        let decision = decide(&nodes, &jobs, rules).into_iter().find(|decision| {
            matches!(*decision, GateDecision::Admit { job, .. } | GateDecision::Wait { job, .. } if job == first)
        });
        let offered = offer(&nodes, &jobs, first, rules);
        match (decision, &offered) {
            (Some(GateDecision::Admit { node, far_bytes, .. }), Ok(offer)) => {
                assert_eq!(offer.best(0..count), Some(node), "seed {seed}");
                assert_eq!(offer.nodes[node], Ok(far_bytes), "seed {seed}");
                assert_ne!(offer.best((0..count).filter(|&other| other != node)), Some(node), "seed {seed}");
                offers += 1;
            }
            (
                Some(GateDecision::Wait {
                    reason: GateWait::Near { .. } | GateWait::Far { .. } | GateWait::Cores, ..
                }),
                Ok(offer),
            ) => {
                assert_eq!(offer.best(0..count), None, "seed {seed}");
                assert!(offer.nodes.iter().all(Result::is_err), "seed {seed}");
            }
            (Some(GateDecision::Wait { reason, .. }), Err(other)) => assert_eq!(reason, *other, "seed {seed}"),
            other => panic!("seed {seed}: {other:?}"),
        }
        // Who has waited too long closes the gate for all behind it, as it does in a decision.
        for (index, job) in jobs.iter().enumerate().filter(|(_, job)| job.phase == GatePhase::Waiting) {
            let closes = jobs[..index].iter().enumerate().any(|(before, other)| {
                let is_stuck = || offer(&nodes, &jobs, before, rules).is_ok_and(|it| it.best(0..count).is_none());
                other.phase == GatePhase::Waiting && other.waited_s >= 3600 && is_stuck()
            });
            if rules.pool_bytes.is_some() {
                let is_closed = offer(&nodes, &jobs, index, rules) == Err(GateWait::Turn);
                assert_eq!(is_closed, closes, "seed {seed}: {job:?}");
            }
        }
    }
    assert!(offers > 200, "{offers}");
}

#[test]
fn strange_sizes_are_counted_without_overflow() {
    let most = (1 << 53) - 1;
    let full = GateNode { foreign_cores: u32::MAX, foreign_bytes: u64::MAX >> 8, ..node(u32::MAX, 1 << 53) };
    let jobs = [running(most, 1, most), running(most, most, 0), waiting(most, most)];
    let decisions = decide(&[full], &jobs, rules(u64::MAX));
    assert_eq!(decisions.last(), Some(&GateDecision::Wait { job: 2, reason: GateWait::Cores }));
    assert_eq!(decide(&[], &[waiting(1, 1)], rules(1)), [GateDecision::Wait { job: 0, reason: GateWait::Never }]);
}
