//! What a kernel's PTX reads from and writes to memory, and where.

use std::collections::BTreeMap;

use serde::Serialize;

use super::flow::Flow;
use super::ptx::{Definitions, Function, Instruction, Pointer, address};

/// Direction of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Way {
    Load,
    Store,
}

/// Place of an access relative to the loop over keys: the outermost loop that has matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Place {
    Before,
    Inside,
    After,
    /// The kernel has no such loop.
    #[serde(rename = "no loop over keys")]
    NoLoop,
}

impl Place {
    pub(super) fn name(self) -> &'static str {
        match self {
            Place::Before => "before",
            Place::Inside => "inside",
            Place::After => "after",
            Place::NoLoop => "no loop",
        }
    }
}

/// Global accesses to one tensor in one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Access {
    pub(super) way: Way,
    /// The tensor, or the parameter and offset where the kernel is not one of this project.
    pub(super) tensor: String,
    pub(super) place: Place,
    /// Instructions.
    pub(super) instructions: u32,
    /// Bytes of a thread that executes each of them once.
    pub(super) bytes: u32,
    /// Whether some of them are in a loop of any kind.
    pub(super) in_a_loop: bool,
}

/// What PTX says of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Kernel {
    pub(super) entry: String,
    pub(super) accesses: Vec<Access>,
    pub(super) shared_loads: u32,
    pub(super) shared_stores: u32,
    /// Local memory: arrays that are indexed at run time. Spills do not show here.
    pub(super) local_loads: u32,
    pub(super) local_stores: u32,
    pub(super) matrix: u32,
    /// Those by name: `mma.sync`, `wgmma.mma_async`.
    pub(super) matrix_by: BTreeMap<String, u32>,
    /// Copies by the copy engine (TMA), to shared memory and from there.
    pub(super) bulk_loads: u32,
    pub(super) bulk_stores: u32,
    pub(super) exponentials: u32,
}

/// Reads `function`; `name` says what stands at an offset of its argument block, where that is known.
pub(super) fn kernel(
    function: &Function,
    name: impl Fn(Pointer) -> Option<&'static str>,
) -> Kernel {
    let flow = Flow::new(function);
    let body = &function.body;
    // Blocks of this one take one row block after another, in a loop around that over keys.
    let keys = match function.name.as_str() {
        "tw_hopper" => flow.innermost_over(|at| is_matrix(&body[at])),
        _ => flow.loop_over(|at| is_matrix(&body[at])),
    };
    let definitions = Definitions::new(function);
    let mut kernel = Kernel {
        entry: function.name.clone(),
        ..Kernel::default()
    };
    let mut found: BTreeMap<(Way, String, Place), Access> = BTreeMap::new();
    for (at, instruction) in body.iter().enumerate() {
        if let Some(count) = kernel.counter(instruction) {
            *count += 1;
        }
        if is_matrix(instruction) {
            let name = instruction.op.split('.').take(2).collect::<Vec<_>>();
            *kernel.matrix_by.entry(name.join(".")).or_default() += 1;
        }
        for (way, operand, bytes) in global(instruction) {
            if is_bulk(instruction) {
                match way {
                    Way::Load => kernel.bulk_loads += 1,
                    Way::Store => kernel.bulk_stores += 1,
                }
            }
            let base = address(operand).map_or(operand, |(base, _)| base);
            let mut pointers = definitions.pointers(base);
            if has_tensor_map(instruction) {
                pointers.extend(definitions.argument(base));
            }
            let named: Vec<&str> = pointers.iter().filter_map(|&p| name(p)).collect();
            let tensor = match (&named[..], pointers.len()) {
                ([], 0) => "unknown".to_string(),
                ([], _) => {
                    let all = pointers.iter().map(|p| match p.offset {
                        0 => format!("param {}", p.param),
                        offset => format!("param {} + {offset}", p.param),
                    });
                    all.collect::<Vec<_>>().join(" or ")
                }
                // Strides may have been added up with the pointer: what has a name is one.
                (named, _) => named.join(" or "),
            };
            let place = match &keys {
                None => Place::NoLoop,
                Some(keys) if flow.inside(keys, at) => Place::Inside,
                Some(keys) if flow.after(keys, at) => Place::After,
                Some(_) => Place::Before,
            };
            let access = found
                .entry((way, tensor.clone(), place))
                .or_insert_with(|| Access {
                    way,
                    tensor,
                    place,
                    instructions: 0,
                    bytes: 0,
                    in_a_loop: false,
                });
            access.instructions += 1;
            access.bytes += bytes;
            access.in_a_loop |= flow.in_a_loop(at);
        }
    }
    kernel.accesses = found.into_values().collect();
    kernel
}

fn is_matrix(instruction: &Instruction) -> bool {
    ["mma", "wmma.mma", "wgmma.mma_async", "tcgen05.mma"]
        .iter()
        .any(|op| instruction.is(op))
}

/// Whether the copy engine is told by a tensor map, not by an address, what to move.
fn has_tensor_map(instruction: &Instruction) -> bool {
    is_bulk(instruction) && instruction.op.contains(".tensor.")
}

/// Copies and reductions that the copy engine (TMA) makes between global and shared memory.
fn is_bulk(instruction: &Instruction) -> bool {
    let op = instruction.op.as_str();
    let bulk = op.starts_with("cp.async.bulk") || op.starts_with("cp.reduce.async.bulk");
    // Waits and prefetches move nothing that the kernel sees.
    bulk && op.contains(".global") && op.contains(".shared")
}

/// Accesses to global memory, with the operand that holds the address. An address that names no space
/// counts: it may be anywhere.
fn global(instruction: &Instruction) -> Vec<(Way, &str, u32)> {
    let operand = |at: usize| instruction.operands.get(at).map(String::as_str);
    let space = |op: &str| instruction.op.strip_prefix(op);
    let elsewhere = |rest: &str| {
        let mut parts = rest.split('.');
        parts.any(|part| matches!(part, "shared" | "local" | "param" | "const"))
    };
    let mut found = Vec::new();
    if space("st.").is_some_and(|rest| !elsewhere(rest)) {
        found.extend(operand(0).map(|at| (Way::Store, at, instruction.bytes())));
    } else if space("ld.").is_some_and(|rest| !elsewhere(rest)) {
        found.extend(operand(1).map(|at| (Way::Load, at, instruction.bytes())));
    } else if instruction.is("red") || instruction.is("atom") {
        if !elsewhere(&instruction.op) {
            let at = usize::from(instruction.is("atom"));
            found.extend(operand(at).map(|at| (Way::Store, at, instruction.bytes())));
        }
    } else if is_bulk(instruction) {
        // The destination stands first in the name and among the operands.
        let stores = instruction.op.find(".global") < instruction.op.find(".shared");
        let bytes = match has_tensor_map(instruction) {
            true => None,
            false => operand(2).and_then(|size| size.parse().ok()),
        };
        let (way, at) = match stores {
            true => (Way::Store, 0),
            false => (Way::Load, 1),
        };
        found.extend(operand(at).map(|at| (way, at, bytes.unwrap_or(0))));
    } else if instruction.is("cp.async.bulk") {
        // A wait, a prefetch, or between blocks.
    } else if instruction.is("cp.async") && instruction.op.contains(".global") {
        let bytes = operand(2).and_then(|size| size.parse().ok()).unwrap_or(0);
        found.extend(operand(1).map(|at| (Way::Load, at, bytes)));
    }
    found
}

impl Kernel {
    fn counter(&mut self, instruction: &Instruction) -> Option<&mut u32> {
        let op = instruction.op.as_str();
        Some(match () {
            () if is_matrix(instruction) => &mut self.matrix,
            () if op.starts_with("ex2.") => &mut self.exponentials,
            () if op.starts_with("ld.shared") || op.starts_with("ldmatrix") => {
                &mut self.shared_loads
            }
            () if op.starts_with("st.shared") || op.starts_with("stmatrix") => {
                &mut self.shared_stores
            }
            () if op.starts_with("ld.local") => &mut self.local_loads,
            () if op.starts_with("st.local") => &mut self.local_stores,
            () => return None,
        })
    }

    /// The tensors accessed so, in alphabetical order.
    pub(super) fn tensors(&self, way: Way, place: Option<Place>) -> Vec<&str> {
        let accesses = self.accesses.iter();
        let mut names: Vec<&str> = accesses
            .filter(|a| a.way == way && place.is_none_or(|place| a.place == place))
            .map(|a| a.tensor.as_str())
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

#[cfg(test)]
mod tests {
    use super::super::ptx;
    use super::*;

    /// What Hopper has: the copy engine's loads and stores by tensor map, products of warpgroups.
    #[test]
    fn the_copy_engine_and_warpgroups_are_known() {
        let text = ".version 8.0
.visible .entry f(.param .align 128 .b8 f_param_0[256], .param .u64 f_param_1)
{
	mov.b64 %rd1, f_param_0;
	cvta.param.u64 %rd2, %rd1;
	add.s64 %rd3, %rd2, 128;
	ld.param.u64 %rd4, [f_param_1];
LOOP:
	cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r2, %r3, %r4, %r5}], [%r6];
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd4], 512, [%r6];
	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1, %f2}, %rd7, %rd8, p, 1, 1, 0, 0;
	wgmma.wait_group.sync.aligned 0;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2}, {%r1, %r2}, {%r3, %r4}, {%f1, %f2};
	@%p1 bra LOOP;
	cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%rd3, {%r2, %r3, %r4, %r5}], [%r1];
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group 0;
	ret;
}";
        let functions = ptx::parse(text).unwrap();
        let name = |pointer: Pointer| match (pointer.param, pointer.offset) {
            (0, 0) => Some("k"),
            (0, 128) => Some("out"),
            (1, 0) => Some("v"),
            _ => None,
        };
        let kernel = kernel(&functions[0], name);
        let found: Vec<_> = kernel
            .accesses
            .iter()
            .map(|a| (a.way, a.tensor.as_str(), a.place, a.bytes))
            .collect();
        assert_eq!(
            found,
            [
                (Way::Load, "k", Place::Inside, 0),
                (Way::Load, "v", Place::Inside, 512),
                (Way::Store, "out", Place::After, 0),
            ]
        );
        assert_eq!((kernel.bulk_loads, kernel.bulk_stores), (2, 1));
        assert_eq!(kernel.matrix, 2);
        let by: Vec<_> = kernel.matrix_by.keys().map(String::as_str).collect();
        assert_eq!(by, ["mma.sync", "wgmma.mma_async"]);
    }
}
