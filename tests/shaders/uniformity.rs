//! Where does a shader wait at a barrier that not all threads of a workgroup may reach? naga accepts that, Tint and
//! drivers do not.
//!
//! Control flow is uniform as long as it depends on workgroup numbers, uniforms, read-only storage indexed by uniform
//! values, and `workgroupUniformLoad`. A variable counts as uniform when every store into it is of a uniform value under
//! uniform control flow; a function's result when it reads nothing else than its uniform arguments and those sources.
//! Functions that wait are called under uniform control flow, and wait whatever their arguments are.

use naga::{
    AddressSpace, Block, BuiltIn, Expression, Function, Handle, LocalVariable, Module, Statement, StorageAccess,
};
use std::collections::{HashMap, HashSet};

/// The barriers of all functions that may be reached by some threads only, one line each.
pub(crate) fn divergent_barriers(module: &Module) -> Vec<String> {
    let mut called = HashMap::new();
    let mut found = Vec::new();
    // Functions stand after those that they call.
    for (handle, function) in module.functions.iter() {
        let [with_uniform, with_any] = [true, false].map(|uniform| Walk::over(module, function, &called, uniform));
        found.extend(with_any.divergent.iter().map(|what| format!("{}: {what}", name(function))));
        let waits = with_any.barriers > 0;
        let function = Called { uniform: with_uniform.returns_uniform, always: with_any.returns_uniform, waits };
        called.insert(handle, function);
    }
    for entry in &module.entry_points {
        let walk = Walk::over(module, &entry.function, &called, false);
        found.extend(walk.divergent.iter().map(|what| format!("{}: {what}", entry.name)));
    }
    found
}

fn name(function: &Function) -> &str {
    function.name.as_deref().unwrap_or("a function")
}

/// What a function is to those that call it.
#[derive(Clone, Copy)]
struct Called {
    /// Whether its result is uniform when its arguments are.
    uniform: bool,
    /// Whether it is whatever they are.
    always: bool,
    waits: bool,
}

/// How far control flow has come apart after a statement.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Split {
    Not,
    /// Until the end of the loop.
    Loop,
    /// Until the end of the function.
    Function,
}

struct Walk<'a> {
    module: &'a Module,
    function: &'a Function,
    called: &'a HashMap<Handle<Function>, Called>,
    /// Whether plain arguments count as uniform.
    uniform_arguments: bool,
    varying: HashSet<Handle<LocalVariable>>,
    calls: HashMap<Handle<Expression>, bool>,
    returns_uniform: bool,
    barriers: usize,
    divergent: Vec<String>,
}

impl<'a> Walk<'a> {
    fn over(
        module: &'a Module,
        function: &'a Function,
        called: &'a HashMap<Handle<Function>, Called>,
        uniform_arguments: bool,
    ) -> Self {
        let (varying, calls, divergent) = (HashSet::new(), HashMap::new(), Vec::new());
        let (returns_uniform, barriers) = (true, 0);
        let mut walk =
            Walk { module, function, called, uniform_arguments, varying, calls, returns_uniform, barriers, divergent };
        // Until no further variable is found to vary.
        loop {
            let known = walk.varying.len();
            (walk.returns_uniform, walk.barriers, walk.divergent) = (true, 0, Vec::new());
            walk.block(&function.body, true);
            if walk.varying.len() == known {
                return walk;
            }
        }
    }

    fn block(&mut self, block: &Block, mut uniform: bool) -> Split {
        let mut split = Split::Not;
        for statement in block {
            let after = self.statement(statement, uniform);
            uniform &= after == Split::Not;
            split = split.max(after);
        }
        split
    }

    fn statement(&mut self, statement: &Statement, uniform: bool) -> Split {
        match statement {
            Statement::Block(block) => return self.block(block, uniform),
            Statement::If { condition, accept, reject } => {
                let inside = uniform && self.uniform(*condition);
                return self.block(accept, inside).max(self.block(reject, inside));
            }
            Statement::Switch { selector, cases } => {
                let inside = uniform && self.uniform(*selector);
                let splits: Vec<_> = cases.iter().map(|case| self.block(&case.body, inside)).collect();
                return splits.into_iter().max().unwrap_or(Split::Not);
            }
            Statement::Loop { body, continuing, break_if } => {
                let mut inside = uniform;
                loop {
                    let mut split = self.block(body, inside).max(self.block(continuing, inside));
                    if break_if.is_some_and(|condition| !self.uniform(condition)) {
                        split = split.max(Split::Loop);
                    }
                    if split == Split::Function {
                        return split;
                    }
                    // What came apart in one round is apart in the next one, and together again after the loop.
                    if split == Split::Not || !inside {
                        return Split::Not;
                    }
                    inside = false;
                }
            }
            Statement::Break | Statement::Continue if !uniform => return Split::Loop,
            Statement::Return { value } => {
                self.returns_uniform &= uniform && value.is_none_or(|value| self.uniform(value));
                return if uniform { Split::Not } else { Split::Function };
            }
            Statement::ControlBarrier(_) | Statement::WorkGroupUniformLoad { .. } => self.barrier(uniform),
            Statement::Store { pointer, value } => {
                let same = uniform && self.uniform(*value) && self.indices_uniform(*pointer);
                if let (false, Some(local)) = (same, self.local(*pointer)) {
                    self.varying.insert(local);
                }
            }
            Statement::Call { function, arguments, result } => {
                let called = self.called[function];
                if called.waits {
                    self.barrier(uniform);
                }
                let given = arguments.iter().all(|argument| self.uniform(*argument));
                let uniform = called.always || (called.uniform && given);
                // A pointer argument lets the callee write.
                let written: Vec<_> = arguments.iter().filter_map(|argument| self.local(*argument)).collect();
                self.varying.extend(written);
                if let Some(result) = result {
                    self.calls.insert(*result, uniform);
                }
            }
            _ => {}
        }
        Split::Not
    }

    fn barrier(&mut self, uniform: bool) {
        self.barriers += 1;
        if !uniform {
            self.divergent.push(format!("barrier {} may be reached by some threads only", self.barriers));
        }
    }

    /// The local variable that a pointer leads into.
    fn local(&self, pointer: Handle<Expression>) -> Option<Handle<LocalVariable>> {
        match self.function.expressions[pointer] {
            Expression::LocalVariable(local) => Some(local),
            Expression::Access { base, .. } | Expression::AccessIndex { base, .. } => self.local(base),
            _ => None,
        }
    }

    fn indices_uniform(&self, pointer: Handle<Expression>) -> bool {
        match self.function.expressions[pointer] {
            Expression::Access { base, index } => self.uniform(index) && self.indices_uniform(base),
            Expression::AccessIndex { base, .. } => self.indices_uniform(base),
            _ => true,
        }
    }

    fn uniform(&self, expression: Handle<Expression>) -> bool {
        use Expression as E;
        let all = |parts: &[Handle<Expression>]| parts.iter().all(|part| self.uniform(*part));
        match self.function.expressions[expression] {
            E::Literal(_) | E::Constant(_) | E::Override(_) | E::ZeroValue(_) | E::ArrayLength(_) => true,
            E::WorkGroupUniformLoadResult { .. } => true,
            E::FunctionArgument(at) => match self.function.arguments[at as usize].binding {
                Some(naga::Binding::BuiltIn(built_in)) => {
                    matches!(built_in, BuiltIn::WorkGroupId | BuiltIn::WorkGroupSize | BuiltIn::NumWorkGroups)
                }
                _ => self.uniform_arguments,
            },
            E::GlobalVariable(global) => match self.module.global_variables[global].space {
                AddressSpace::Uniform | AddressSpace::Immediate => true,
                AddressSpace::Storage { access } => !access.contains(StorageAccess::STORE),
                _ => false,
            },
            E::LocalVariable(local) => !self.varying.contains(&local),
            E::CallResult(_) => self.calls.get(&expression).copied().unwrap_or(true),
            E::Load { pointer } => self.uniform(pointer),
            E::Access { base, index } => all(&[base, index]),
            E::AccessIndex { base, .. } => self.uniform(base),
            E::Splat { value, .. } => self.uniform(value),
            E::Swizzle { vector, .. } => self.uniform(vector),
            E::Compose { ref components, .. } => all(components),
            E::Unary { expr, .. } | E::As { expr, .. } => self.uniform(expr),
            E::Relational { argument, .. } => self.uniform(argument),
            E::Binary { left, right, .. } => all(&[left, right]),
            E::Select { condition, accept, reject } => all(&[condition, accept, reject]),
            E::Math { arg, arg1, arg2, arg3, .. } => {
                [Some(arg), arg1, arg2, arg3].into_iter().flatten().all(|arg| self.uniform(arg))
            }
            _ => false,
        }
    }
}
