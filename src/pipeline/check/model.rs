//! Checks of one model: its features, partition, network and training.

use super::Checker;
use crate::{
    limits,
    pipeline::{
        plan::{FeaturePlan, ModelPlan, NetPlan, Optimizer, PartitionPlan, RunPlan, TrainPlan},
        spec::{
            Activation, Choice, Compression, FeatureSpec, Keep, Loss, Missing, ModelSpec, OptimizerKind, PartitionBy,
            PartitionSpec, Scale, Schedule, ServerMode, Spread, SyncStrategy, TrainSpec,
        },
    },
};

/// Parameter servers at most: each has a connection to every executor.
const MAX_SERVERS: u32 = 64;

impl Checker<'_> {
    /// One model.
    pub fn model(&mut self, name: &str, spec: &ModelSpec, run: &RunPlan) -> ModelPlan {
        // What the rows are dealt to must not depend on the machine.
        let executors = if run.choose_executors { 1 } else { run.executors };
        let at = ["models", name];
        self.table(&[at[0], at[1], "from"], &spec.from);
        let message = "a model needs at least one feature";
        self.require(!spec.features.is_empty(), &[at[0], at[1], "features"], message, "such as `- column: price`");
        ModelPlan {
            name: name.to_owned(),
            from: spec.from.clone(),
            features: spec.features.iter().enumerate().map(|(i, feature)| self.feature(name, i, feature)).collect(),
            partition: self.partition(name, &spec.partition, executors),
            net: self.net(name, spec),
            spread: self.spread(name, spec, run),
            train: self.train(name, &spec.train),
        }
    }

    fn feature(&mut self, model: &str, index: usize, spec: &FeatureSpec) -> FeaturePlan {
        let index = index.to_string();
        let at = ["models", model, "features", &index];
        let path = |key: &'static str| [at[0], at[1], at[2], at[3], key];
        match (&spec.column, spec.columns.is_empty()) {
            (Some(_), false) => self.fault(&path("columns"), "give `column` or `columns`, not both", None),
            (None, true) => {
                self.fault(&at, "a feature needs its column", Some("give `column` or `columns`".to_owned()));
            }
            (Some(column), true) if column.contains('*') => {
                let help = format!("write `columns: [\"{column}\"]`");
                self.fault(&path("column"), "`column` names one column, a pattern may be several", Some(help));
            }
            _ => {}
        }
        for (position, column) in spec.columns.iter().enumerate() {
            let path = [at[0], at[1], at[2], at[3], "columns", &position.to_string()];
            self.require(!column.is_empty(), &path, "expected the name of a column, found nothing", "");
        }
        if let Scale::Divide(divisor) = spec.scale {
            let message = "cannot divide by this";
            let path = [at[0], at[1], at[2], at[3], "scale", "divide"];
            self.require(divisor != 0.0, &path, message, "give another number than 0");
        }
        if spec.indicator && matches!(spec.missing, Missing::Error | Missing::Reject) {
            let help = "say what stands in for it: `missing: mean`, `median` or `{ constant: 0 }`";
            self.fault(&path("indicator"), "no row has a missing value here to indicate", Some(help.to_owned()));
        }
        let columns = spec.column.iter().chain(&spec.columns).cloned().collect();
        FeaturePlan { columns, scale: spec.scale, missing: spec.missing, indicator: spec.indicator }
    }

    fn partition(&mut self, model: &str, choice: &Choice<PartitionSpec>, executors: u32) -> PartitionPlan {
        let open = PartitionSpec::default();
        let spec = if let Choice::Fixed(spec) = choice { spec } else { &open };
        let path = |key: &'static str| ["models", model, "partition", key];
        let at = &["models", model, "partition"];
        if !self.mended.covers(&path("by")) {
            let hash = spec.by == PartitionBy::Hash;
            if hash && spec.columns.is_empty() {
                self.fault(at, "`by: hash` needs the columns to hash", Some("such as `columns: [user_id]`".to_owned()));
            }
            if !hash && !spec.columns.is_empty() {
                self.fault(&path("columns"), "only `by: hash` takes columns", Some("add `by: hash`".to_owned()));
            }
        }
        let count = spec.count.unwrap_or(limits::PARTITIONS.max(executors.min(limits::MAX_PARTITIONS)));
        let message = format!("expected 1 to {} partitions", limits::MAX_PARTITIONS);
        self.require((1..=limits::MAX_PARTITIONS).contains(&count), &path("count"), &message, "");
        PartitionPlan { by: spec.by, columns: spec.columns.clone(), count, choose: *choice == Choice::Auto }
    }

    fn net(&mut self, model: &str, spec: &ModelSpec) -> NetPlan {
        let at = ["models", model];
        let widths = 1..=limits::MAX_FEATURES;
        let message = format!("expected a width from 1 to {}", limits::MAX_FEATURES);
        for (layer, width) in spec.hidden.iter().enumerate() {
            self.require(widths.contains(width), &[at[0], at[1], "hidden", &layer.to_string()], &message, "");
        }
        self.require(widths.contains(&spec.latent), &[at[0], at[1], "latent"], &message, "");
        let cross_entropy = spec.train.loss == Loss::BinaryCrossEntropy;
        let output =
            spec.output_activation.unwrap_or(if cross_entropy { Activation::Sigmoid } else { Activation::Identity });
        if cross_entropy && output != Activation::Sigmoid {
            let help = "write `sigmoid`, or leave it out".to_owned();
            let path = [at[0], at[1], "output_activation"];
            self.fault(&path, "`binary_cross_entropy` needs a reconstruction between 0 and 1", Some(help));
        }
        NetPlan {
            hidden: spec.hidden.clone(),
            latent: spec.latent,
            activation: spec.activation,
            latent_activation: spec.latent_activation,
            output_activation: output,
            tied_weights: spec.tied_weights,
        }
    }

    fn train(&mut self, model: &str, spec: &TrainSpec) -> TrainPlan {
        let path = |key: &'static str| ["models", model, "train", key];
        self.require(spec.epochs >= 1, &path("epochs"), "expected at least one epoch", "");
        self.require(spec.batch >= 1, &path("batch"), "expected at least one row", "");
        self.require(spec.learning_rate > 0.0, &path("learning_rate"), "expected a number above 0", "");
        let clip = spec.clip_norm.is_none_or(|norm| norm > 0.0);
        self.require(clip, &path("clip_norm"), "expected a number above 0", "leave it out for no bound");
        let decay = spec.weight_decay.is_none_or(|decay| decay >= 0.0);
        self.require(decay, &path("weight_decay"), "expected 0 or more", "");
        let held_out = (0.0..=0.9).contains(&spec.validation);
        self.require(held_out, &path("validation"), "expected a fraction from 0 to 0.9", "0.1 holds out a tenth");
        let steps = spec.checkpoint_steps.is_none_or(|steps| steps >= 1);
        self.require(steps, &path("checkpoint_steps"), "expected at least one step", "");
        if let Some(stop) = &spec.early_stopping {
            let inner = |key: &'static str| ["models", model, "train", "early_stopping", key];
            self.require(stop.patience >= 1, &inner("patience"), "expected at least one epoch", "");
            self.require(stop.min_delta >= 0.0, &inner("min_delta"), "expected 0 or more", "");
        }
        if spec.keep == Some(Keep::Best) && spec.validation == 0.0 && !self.mended.covers(&path("validation")) {
            let help = "hold rows out: `validation: 0.1`".to_owned();
            self.fault(&path("keep"), "`best` is measured on rows held out, and none are", Some(help));
        }
        self.schedule(model, spec);
        let keep = spec.keep.unwrap_or(if spec.validation > 0.0 { Keep::Best } else { Keep::Last });
        let adamw = spec.optimizer == OptimizerKind::Adamw;
        let sync = self.sync(model, spec);
        TrainPlan {
            sync,
            choose_sync: spec.sync == Choice::Auto,
            compression: spec.compression,
            epochs: spec.epochs,
            batch: spec.batch,
            loss: spec.loss,
            optimizer: self.optimizer(model, spec),
            learning_rate: spec.learning_rate,
            weight_decay: spec.weight_decay.unwrap_or(if adamw { 0.01 } else { 0.0 }),
            schedule: spec.schedule,
            clip_norm: spec.clip_norm,
            validation: spec.validation,
            early_stopping: spec.early_stopping,
            keep,
            checkpoint_steps: spec.checkpoint_steps,
        }
    }

    /// What makes no sense together is a fault here, so that no run starts with it.
    fn spread(&mut self, model: &str, spec: &ModelSpec, run: &RunPlan) -> Spread {
        let at = |kind: &'static str, key: &'static str| ["models", model, "spread", kind, key];
        match spec.spread {
            Spread::Data {} => return spec.spread,
            Spread::Pipeline { micro_batches } => {
                let message = "expected at least one part of a batch";
                let path = at("pipeline", "micro_batches");
                self.require(micro_batches >= 1, &path, message, "");
                let message = format!("a batch of {} rows has no {micro_batches} parts", spec.train.batch);
                let fits = micro_batches as usize <= spec.train.batch.max(1);
                self.require(fits, &path, &message, "give fewer, or a larger `batch`");
            }
            Spread::Vertical { slices } => {
                let path = at("vertical", "slices");
                self.require(slices >= 1, &path, "expected at least one slice", "");
                let narrowest = spec.hidden.iter().copied().min().unwrap_or(usize::MAX);
                let message = format!("{slices} slices do not fit a hidden layer of {narrowest}");
                self.require(
                    slices as usize <= narrowest,
                    &path,
                    &message,
                    "a slice needs a part of each hidden layer",
                );
            }
        }
        let path = ["models", model, "spread"];
        let executors = run.executors;
        let help = "give a number of `executors`, or use `spread: data`";
        self.require(!run.choose_executors, &path, "`executors: auto` is for models that are not spread", help);
        let most = spec.spread.most_executors(spec.hidden.len());
        let parts = if matches!(spec.spread, Spread::Vertical { .. }) { "slices" } else { "layers" };
        let stand_in = self.mended.covers(&["models", model, "hidden"]) || self.mended.covers(&["run", "executors"]);
        if most > 0 && !stand_in && !run.choose_executors {
            let message = format!("more executors than {parts}: {executors} for {most}");
            let help = format!("set `executors: {most}`, or use `spread: data`");
            self.require(executors <= most, &path, &message, &help);
        }
        self.require(
            !spec.tied_weights,
            &path,
            "`tied_weights` needs encoder and decoder in one place",
            "use `spread: data`",
        );
        let path = ["models", model, "train", "sync"];
        let replicas = spec.train.sync == Choice::Fixed(SyncStrategy::default());
        let message = "a model that is spread has no replicas to keep alike";
        self.require(replicas, &path, message, "leave `sync` out, or use `spread: data`");
        let path = ["models", model, "train", "compression"];
        let plain = spec.train.compression == Compression::None;
        self.require(plain, &path, "a model that is spread exchanges no gradients", "leave `compression` out");
        spec.spread
    }

    fn sync(&mut self, model: &str, spec: &TrainSpec) -> SyncStrategy {
        let Choice::Fixed(sync) = spec.sync else {
            let path = ["models", model, "train", "compression"];
            let open = spec.compression == Compression::None;
            self.require(open, &path, "`sync: auto` chooses it", "leave `compression` out, or name a `sync`");
            return SyncStrategy::default();
        };
        let at = |kind: &'static str, key: &'static str| ["models", model, "train", "sync", kind, key];
        match sync {
            SyncStrategy::AllReduce { batches } => {
                self.require(batches >= 1, &at("all_reduce", "batches"), "expected at least one step", "");
            }
            SyncStrategy::Sharded {} => {}
            SyncStrategy::ParameterServer { servers, mode, staleness } => {
                let path = at("parameter_server", "servers");
                self.require((1..=MAX_SERVERS).contains(&servers), &path, "expected 1 to 64 servers", "");
                let path = at("parameter_server", "staleness");
                let bounded = mode == ServerMode::Bounded || staleness.is_none();
                self.require(bounded, &path, "`staleness` is for `mode: bounded`", "leave it out, or add that");
                let message = format!("expected 0 to {} steps", limits::STEPS_AHEAD);
                let fits = staleness.is_none_or(|steps| steps <= limits::STEPS_AHEAD);
                self.require(fits, &path, &message, "");
            }
            SyncStrategy::LocalSgd { steps, outer_momentum, outer_learning_rate } => {
                self.require(steps >= 1, &at("local_sgd", "steps"), "expected at least one step", "");
                let path = at("local_sgd", "outer_momentum");
                let fits = (0.0..1.0).contains(&outer_momentum);
                self.require(fits, &path, "expected a number from 0, below 1", "");
                let path = at("local_sgd", "outer_learning_rate");
                self.require(outer_learning_rate > 0.0, &path, "expected a number above 0", "");
            }
        }
        if let Compression::TopK(fraction) = spec.compression {
            let path = ["models", model, "train", "compression"];
            let fits = fraction > 0.0 && fraction <= 1.0;
            self.require(fits, &path, "expected a fraction above 0, up to 1", "0.01 sends the largest hundredth");
            let exchanges = matches!(sync, SyncStrategy::AllReduce { .. });
            let message = "`top_k` is for `sync: all_reduce`";
            self.require(exchanges, &path, message, "use `compression: bf16`, or leave it out");
        }
        sync
    }

    fn schedule(&mut self, model: &str, spec: &TrainSpec) {
        let at = |kind: &'static str, key: &'static str| ["models", model, "train", "schedule", kind, key];
        match spec.schedule {
            Schedule::Constant {} => {}
            Schedule::Step { epochs, factor } => {
                self.require(epochs >= 1, &at("step", "epochs"), "expected at least one epoch", "");
                self.require(factor > 0.0, &at("step", "factor"), "expected a number above 0", "");
            }
            Schedule::Cosine { warmup_epochs, floor } => {
                let fits =
                    warmup_epochs < spec.epochs.max(1) || self.mended.covers(&["models", model, "train", "epochs"]);
                let message = format!("the rise must end before the training: fewer than {} epochs", spec.epochs);
                self.require(fits, &at("cosine", "warmup_epochs"), &message, "");
                let message = "expected a fraction from 0 to 1";
                self.require((0.0..=1.0).contains(&floor), &at("cosine", "floor"), message, "");
            }
        }
    }

    fn optimizer(&mut self, model: &str, spec: &TrainSpec) -> Optimizer {
        let path = |key: &'static str| ["models", model, "train", key];
        let sgd = spec.optimizer == OptimizerKind::Sgd;
        if !self.mended.covers(&path("optimizer")) {
            let for_sgd = sgd || spec.momentum.is_none();
            self.require(for_sgd, &path("momentum"), "`momentum` is for `optimizer: sgd`", "Adam has `betas`");
            let message = "is for `optimizer: adam` and `adamw`";
            self.require(
                !sgd || spec.betas.is_none(),
                &path("betas"),
                &format!("`betas` {message}"),
                "sgd has `momentum`",
            );
            self.require(!sgd || spec.epsilon.is_none(), &path("epsilon"), &format!("`epsilon` {message}"), "");
        }
        let momentum = spec.momentum.unwrap_or(0.0);
        self.require((0.0..1.0).contains(&momentum), &path("momentum"), "expected a number from 0, below 1", "");
        let betas = spec.betas.unwrap_or([0.9, 0.999]);
        let fit = betas.iter().all(|beta| (0.0..1.0).contains(beta));
        self.require(fit, &path("betas"), "expected two numbers from 0, below 1", "");
        let epsilon = spec.epsilon.unwrap_or(1e-8);
        self.require(epsilon > 0.0, &path("epsilon"), "expected a number above 0", "");
        match spec.optimizer {
            OptimizerKind::Sgd => Optimizer::Sgd { momentum },
            OptimizerKind::Adam => Optimizer::Adam { betas, epsilon },
            OptimizerKind::Adamw => Optimizer::Adamw { betas, epsilon },
        }
    }
}
