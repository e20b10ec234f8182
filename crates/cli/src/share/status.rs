//! What nodes of this machine do, and what their tasks wait for.

use crate::notice::{FoundNotice, Notice};
use anyhow::ensure;
use clap::Args;
use farfield_core::notice;
use farfield_pager::runner::{ByteSize, processes};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

/// Show the nodes that run on this machine: where they are, what they keep, what they run.
#[derive(Args, Debug)]
pub(super) struct ShareStatusArgs {
    /// A process of the program. Without it, all programs of this user
    #[arg(value_name = "PID")]
    pid: Option<u32>,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

/// Say what the tasks of a program wait for, and who keeps them waiting.
///
/// Nodes of this machine only: run it on each.
#[derive(Args, Debug)]
pub(super) struct ShareExplainArgs {
    /// A process of the program
    #[arg(value_name = "PID")]
    pid: u32,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

/// A node, as its notice shows it.
#[derive(Serialize, Debug)]
pub(crate) struct NodeRow {
    /// Number that the nodes of a program have in common.
    pub(crate) program: String,
    pub(crate) node: u64,
    pub(crate) pid: u32,
    command: String,
    url: String,
    nodes: u64,
    pub(crate) lost_nodes: Vec<u64>,
    pub(crate) waits: Vec<WaitRow>,
    /// Locks of the node that somebody waits for.
    wanted_locks: Vec<LockRow>,
    /// Names of shared values, at the first node: at most the first 32 of `names`.
    named_values: Vec<NamedRow>,
    pub(crate) counters: BTreeMap<String, u64>,
}

/// Wait of a task.
#[derive(Serialize, Debug)]
pub(crate) struct WaitRow {
    /// `task`, `lock`, `channel`, `name` or `answer`.
    cause: String,
    /// Node that ends the wait.
    node: u64,
    pub(crate) milliseconds: u64,
    /// Owner's word of the lock or the channel, hexadecimal.
    word: String,
}

#[derive(Serialize, Debug)]
pub(crate) struct LockRow {
    word: String,
    waiters: u64,
    /// Nodes whose tasks hold it.
    holders: Vec<u64>,
}

/// Name of a shared value.
#[derive(Serialize, Debug)]
struct NamedRow {
    name: String,
    /// Type of the value, or the begin of its name.
    type_name: String,
    /// Node that keeps the value.
    node: u64,
    /// Whether the value is gone with its node.
    is_lost: bool,
}

impl NodeRow {
    /// Returns the nodes of this machine that this user may inspect, by program and number.
    pub(crate) fn all() -> Vec<NodeRow> {
        let found = processes().flat_map(|pid| FoundNotice::find(pid, notice::OF_NODE));
        let mut rows: Vec<_> = found.map(|found| NodeRow::new(&found)).collect();
        rows.sort_by(|a, b| (&a.program, a.node).cmp(&(&b.program, b.node)));
        rows
    }

    fn new(found: &FoundNotice) -> NodeRow {
        let notice = &found.notice;
        let number = |text: &&str| text.parse().unwrap_or(0);
        let wait = |words: Vec<&str>| {
            let [cause, node, milliseconds, word] = words[..] else { return None };
            Some(WaitRow {
                cause: cause.to_owned(),
                node: number(&node),
                milliseconds: number(&milliseconds),
                word: word.to_owned(),
            })
        };
        let lock = |words: Vec<&str>| {
            let [word, waiters, holders @ ..] = &words[..] else { return None };
            let holders = holders.iter().map(number).collect();
            Some(LockRow { word: (*word).to_owned(), waiters: number(waiters), holders })
        };
        let named = |words: Vec<&str>| {
            let [node, is_lost, name, type_name @ ..] = &words[..] else { return None };
            Some(NamedRow {
                name: (*name).to_owned(),
                type_name: type_name.join(" "),
                node: number(node),
                is_lost: *is_lost == "1",
            })
        };
        NodeRow {
            program: notice.text("program").to_owned(),
            node: notice.number("node"),
            pid: found.pid,
            command: crate::top::command_line(found.pid),
            url: notice.text("url").to_owned(),
            nodes: notice.number("nodes"),
            lost_nodes: notice.numbers("lost_nodes"),
            waits: notice.rows("wait").filter_map(wait).collect(),
            wanted_locks: notice.rows("lock").filter_map(lock).collect(),
            named_values: notice.rows("name").filter_map(named).collect(),
            counters: Notice::counters(notice),
        }
    }

    fn number(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }
}

/// Returns the nodes of this machine, of one program if it is given by a process, by program and number.
fn rows(pid: Option<u32>) -> anyhow::Result<Vec<NodeRow>> {
    let mut rows = NodeRow::all();
    if let Some(pid) = pid {
        let program = rows.iter().find(|row| row.pid == pid).map(|row| row.program.clone());
        ensure!(
            program.is_some(),
            "process {pid} is no node of a program with shared memory: `farfield share status` shows which are"
        );
        rows.retain(|row| Some(&row.program) == program.as_ref());
    }
    Ok(rows)
}

#[derive(Serialize)]
struct NodesView {
    nodes: Vec<NodeRow>,
}

fn print(text: &str) -> anyhow::Result<()> {
    Ok(std::io::Write::write_all(&mut std::io::stdout().lock(), text.as_bytes())?)
}

/// Prints the nodes.
pub(super) fn status(args: &ShareStatusArgs) -> anyhow::Result<()> {
    let nodes = rows(args.pid)?;
    if args.json {
        return print(&format!("{}\n", serde_json::to_string(&NodesView { nodes })?));
    }
    ensure!(
        !nodes.is_empty(),
        "no program with shared memory runs here: `farfield share run --nodes 2 -- PROGRAM` starts one"
    );
    let mut text = String::new();
    let mut program = None;
    for row in &nodes {
        if program != Some(&row.program) {
            program = Some(&row.program);
            // Writing into a string cannot fail.
            let _ = writeln!(text, "program {}  {} nodes  {}", row.program, row.nodes, row.command);
        }
        render(row, &mut text);
    }
    print(&text)
}

fn render(row: &NodeRow, text: &mut String) {
    let bytes = |name: &str| ByteSize(row.number(name));
    let leads = if row.number("leads") > 0 { "  leads" } else { "" };
    let _ = writeln!(text, "  node {}  process {}  {}{leads}", row.node, row.pid, row.url);
    let _ = writeln!(
        text,
        "    near {} of {}: {} of objects, {} of copies   {} of {} workers busy, {} tasks queued",
        ByteSize(row.number("object_bytes") + row.number("copy_bytes")),
        bytes("near_limit_bytes"),
        bytes("object_bytes"),
        bytes("copy_bytes"),
        row.number("running_tasks"),
        row.number("workers"),
        row.number("queued_tasks"),
    );
    let _ = writeln!(
        text,
        "    {} messages of {}   {} objects fetched, {} moved here   {} tasks sent",
        row.number("messages"),
        bytes("message_bytes"),
        row.number("fetches"),
        row.number("moved_objects"),
        row.number("spawns"),
    );
    if row.number("has_backup") > 0 {
        let (left, of) = (row.number("backup_servers"), row.number("backup_servers_at_first"));
        let state = match (left, of) {
            _ if row.number("backup_good") == 0 => "   LOST: this node goes on without".to_owned(),
            (1, 2..) => format!("   UNPROTECTED: 1 of {of} servers is left"),
            _ if left < of => format!("   {left} of {of} servers are left"),
            _ => String::new(),
        };
        let _ = writeln!(
            text,
            "    backup: {} batches of {}, {} wait{state}",
            row.number("backup_batches"),
            bytes("backup_bytes"),
            bytes("backup_waiting_bytes"),
        );
    }
    if row.number("promoted_objects") > 0 {
        let _ = writeln!(
            text,
            "    keeps {} objects of {} of nodes that are gone",
            row.number("promoted_objects"),
            bytes("promoted_bytes"),
        );
    }
    for NamedRow { name, type_name, node, is_lost } in &row.named_values {
        let kept = if *is_lost { "lost with" } else { "at" };
        let _ = writeln!(text, "    name {name}: a {type_name} {kept} node {node}");
    }
    if row.number("names") > row.named_values.len() as u64 {
        let _ = writeln!(text, "    {} names in all", row.number("names"));
    }
    if row.number("orphans") > 0 {
        let _ = writeln!(text, "    {} objects have no owner and stay until the program ends", row.number("orphans"));
    }
    if !row.lost_nodes.is_empty() {
        let _ = writeln!(text, "    lost: node {} (view {})", list(&row.lost_nodes), row.number("view"));
    }
}

fn list(nodes: &[u64]) -> String {
    nodes.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

/// Prints what tasks wait for.
pub(super) fn explain(args: &ShareExplainArgs) -> anyhow::Result<()> {
    let nodes = rows(Some(args.pid))?;
    if args.json {
        return print(&format!("{}\n", serde_json::to_string(&NodesView { nodes })?));
    }
    let mut text = String::new();
    for row in &nodes {
        let _ = writeln!(text, "node {} (process {})", row.node, row.pid);
        if row.waits.is_empty() {
            let idle = if row.number("running_tasks") == 0 { "it runs no task" } else { "its tasks do not wait" };
            let _ = writeln!(text, "  nobody waits: {idle}");
        }
        for wait in &row.waits {
            let _ = writeln!(text, "  {}", sentence(wait, &nodes));
        }
    }
    print(&text)
}

/// Says what is waited for, and why it does not end.
fn sentence(wait: &WaitRow, nodes: &[NodeRow]) -> String {
    let time = Duration::from_millis(wait.milliseconds).as_secs_f64();
    let of = match wait.cause.as_str() {
        "task" => format!("for the end of a task at node {}", wait.node),
        "answer" => format!("for an answer of node {}", wait.node),
        "name" => "for a value to be published under a name".to_owned(),
        cause => format!("for {cause} {} of node {}", wait.word, wait.node),
    };
    let home = nodes.iter().find(|row| row.node == wait.node);
    let why = match home {
        None if nodes.iter().any(|row| row.lost_nodes.contains(&wait.node)) => ", which is gone".to_owned(),
        None => ", which is on another machine".to_owned(),
        Some(home) if wait.cause == "lock" => {
            let lock = home.wanted_locks.iter().find(|lock| lock.word == wait.word);
            lock.map_or_else(String::new, |lock| {
                format!(", which a task of node {} holds; {} wait for it", list(&lock.holders), lock.waiters)
            })
        }
        Some(home) if wait.cause == "task" && home.number("queued_tasks") > 0 => {
            format!(", where {} tasks wait for a worker", home.number("queued_tasks"))
        }
        Some(_) => String::new(),
    };
    format!("a task has waited {time:.1} s {of}{why}")
}
