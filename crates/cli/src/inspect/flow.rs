//! The flow of control in a PTX function: blocks, loops, what comes after what.

use std::collections::BTreeSet;

use super::ptx::Function;

/// Basic blocks and their loops.
pub(super) struct Flow {
    /// Block of each instruction.
    block_of: Vec<usize>,
    successors: Vec<Vec<usize>>,
    loops: Vec<Loop>,
}

/// A natural loop.
#[derive(Clone, Debug)]
pub(super) struct Loop {
    blocks: BTreeSet<usize>,
}

impl Flow {
    pub(super) fn new(function: &Function) -> Flow {
        let body = &function.body;
        let mut starts = BTreeSet::from([0]);
        starts.extend(function.labels.values().copied());
        for (at, instruction) in body.iter().enumerate() {
            if ["bra", "brx", "ret", "exit", "trap"]
                .iter()
                .any(|op| instruction.is(op))
            {
                starts.insert(at + 1);
            }
        }
        starts.retain(|&start| start < body.len());
        let starts: Vec<usize> = starts.into_iter().collect();
        let mut block_of = vec![0; body.len()];
        for (block, &start) in starts.iter().enumerate() {
            let end = starts.get(block + 1).copied().unwrap_or(body.len());
            block_of[start..end].fill(block);
        }
        let target = |label: &str| function.labels.get(label).and_then(|&at| block_of.get(at));
        let mut successors = vec![Vec::new(); starts.len()];
        for (block, next) in successors.iter_mut().enumerate() {
            let end = starts.get(block + 1).copied().unwrap_or(body.len());
            let Some(last) = body.get(end.wrapping_sub(1)) else {
                continue;
            };
            let leaves = ["ret", "exit", "trap"].iter().any(|op| last.is(op));
            if last.is("bra") {
                next.extend(last.operands.first().and_then(|label| target(label)));
            } else if last.is("brx") {
                // A table of targets: any label may be one.
                next.extend(function.labels.values().filter_map(|&at| block_of.get(at)));
            }
            let jumps = last.is("bra") || last.is("brx") || leaves;
            if (!jumps || last.predicated) && block + 1 < starts.len() {
                next.push(block + 1);
            }
        }
        let loops = loops(&successors);
        Flow {
            block_of,
            successors,
            loops,
        }
    }

    /// The loops that hold an instruction for which `matters`, nested ones in the outermost, as one: an
    /// unrolled loop has a second for what is left.
    pub(super) fn loop_over(&self, matters: impl Fn(usize) -> bool) -> Option<Loop> {
        let all: Vec<usize> = (0..self.block_of.len()).filter(|&at| matters(at)).collect();
        let holds = |one: &&Loop| all.iter().any(|&at| self.inside(one, at));
        let blocks: BTreeSet<usize> = self
            .loops
            .iter()
            .filter(holds)
            .flat_map(|one| one.blocks.iter().copied())
            .collect();
        (!blocks.is_empty()).then_some(Loop { blocks })
    }

    /// As [`loop_over`](Self::loop_over), of nested loops the innermost: where the outermost walks rows.
    pub(super) fn innermost_over(&self, matters: impl Fn(usize) -> bool) -> Option<Loop> {
        let all: Vec<usize> = (0..self.block_of.len()).filter(|&at| matters(at)).collect();
        let holding: Vec<&Loop> = self
            .loops
            .iter()
            .filter(|one| all.iter().any(|&at| self.inside(one, at)))
            .collect();
        let within = |inner: &Loop, outer: &Loop| {
            inner.blocks.len() < outer.blocks.len() && inner.blocks.is_subset(&outer.blocks)
        };
        let blocks: BTreeSet<usize> = holding
            .iter()
            .filter(|outer| !holding.iter().any(|inner| within(inner, outer)))
            .flat_map(|one| one.blocks.iter().copied())
            .collect();
        (!blocks.is_empty()).then_some(Loop { blocks })
    }

    pub(super) fn inside(&self, one: &Loop, instruction: usize) -> bool {
        one.blocks.contains(&self.block_of[instruction])
    }

    /// Whether any loop holds the instruction.
    pub(super) fn in_a_loop(&self, instruction: usize) -> bool {
        self.loops.iter().any(|one| self.inside(one, instruction))
    }

    /// Whether it can be executed after the loop was entered, and is not part of it.
    pub(super) fn after(&self, one: &Loop, instruction: usize) -> bool {
        let mut seen = one.blocks.clone();
        let mut open: Vec<usize> = one.blocks.iter().copied().collect();
        while let Some(block) = open.pop() {
            for &next in &self.successors[block] {
                if seen.insert(next) {
                    open.push(next);
                }
            }
        }
        let block = self.block_of[instruction];
        !one.blocks.contains(&block) && seen.contains(&block)
    }
}

/// Natural loops, one a header: the blocks from which the edge back can be reached without passing the
/// header.
fn loops(successors: &[Vec<usize>]) -> Vec<Loop> {
    let dominators = dominators(successors);
    let mut predecessors = vec![Vec::new(); successors.len()];
    for (block, next) in successors.iter().enumerate() {
        for &next in next {
            predecessors[next].push(block);
        }
    }
    let mut loops = Vec::new();
    for header in 0..successors.len() {
        let mut blocks = BTreeSet::from([header]);
        let mut open: Vec<usize> = predecessors[header]
            .iter()
            .copied()
            .filter(|&from| dominators[from].contains(&header))
            .collect();
        if open.is_empty() {
            continue;
        }
        while let Some(block) = open.pop() {
            if blocks.insert(block) {
                open.extend(&predecessors[block]);
            }
        }
        loops.push(Loop { blocks });
    }
    loops
}

/// For each block, those on every way to it from the first. Blocks that cannot be reached have none.
fn dominators(successors: &[Vec<usize>]) -> Vec<BTreeSet<usize>> {
    let mut of: Vec<Option<BTreeSet<usize>>> = vec![None; successors.len()];
    if let Some(first) = of.first_mut() {
        *first = Some(BTreeSet::from([0]));
    }
    let mut changed = true;
    while changed {
        changed = false;
        for block in 0..successors.len() {
            let Some(own) = of[block].clone() else {
                continue;
            };
            for &next in &successors[block] {
                let mut through = own.clone();
                through.insert(next);
                let joined = match &of[next] {
                    None => through,
                    Some(known) => known
                        .intersection(&through)
                        .copied()
                        .chain([next])
                        .collect(),
                };
                if of[next].as_ref() != Some(&joined) {
                    of[next] = Some(joined);
                    changed = true;
                }
            }
        }
    }
    of.into_iter().map(Option::unwrap_or_default).collect()
}

#[cfg(test)]
mod tests {
    use super::super::ptx;
    use super::*;

    #[test]
    fn a_nest_of_loops_has_its_before_inside_and_after() {
        let text = ".version 8.0\n.entry f()\n{
            st.a x;
            OUTER:
            st.b x;
            INNER:
            mma.sync x;
            @%p1 bra INNER;
            @%p3 bra SKIP;
            st.c x;
            SKIP:
            @%p2 bra OUTER;
            bra LAST;
            LAST:
            st.d x;
            @%p4 bra LAST;
            st.e x;
            ret; }";
        let function = &ptx::parse(text).unwrap()[0];
        let flow = Flow::new(function);
        let at = |op: &str| function.body.iter().position(|i| i.op == op).unwrap();
        let keys = &flow.loop_over(|at| function.body[at].is("mma")).unwrap();
        for (op, inside, after, looped) in [
            ("st.a", false, false, false),
            ("st.b", true, false, true),
            ("st.c", true, false, true),
            ("st.d", false, true, true),
            ("st.e", false, true, false),
        ] {
            assert_eq!(flow.inside(keys, at(op)), inside, "{op}");
            assert_eq!(flow.after(keys, at(op)), after, "{op}");
            assert_eq!(flow.in_a_loop(at(op)), looped, "{op}");
        }
        assert!(flow.loop_over(|at| function.body[at].is("wgmma")).is_none());
        let inner = &flow
            .innermost_over(|at| function.body[at].is("mma"))
            .unwrap();
        for (op, inside, after) in [
            ("st.a", false, false),
            ("st.b", false, true),
            ("st.c", false, true),
            ("st.d", false, true),
            ("mma.sync", true, false),
        ] {
            assert_eq!(flow.inside(inner, at(op)), inside, "{op}");
            assert_eq!(flow.after(inner, at(op)), after, "{op}");
        }
    }
}
