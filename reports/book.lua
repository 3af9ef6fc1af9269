-- Both engines: what text of a record or an output can smuggle in is taken out. Without Quarto also what Quarto does itself, as far
-- as the book uses it: numbered figures and tables, references to them, call-outs.

local is_html = FORMAT:match("html") ~= nil
local tags = "^</?(%a+)[%w%s=\"-]*>$"
local harmless = { details = true, summary = true, br = true, sub = true, sup = true, kbd = true, small = true }

local function raw(element)
  local tag = element.format == "html" and element.text:match(tags)
  if not (tag and harmless[tag:lower()]) or element.text:lower():match("%son%a+%s*=") then return {} end
end

local function local_path(target)
  return not target:match("^%a[%w+.-]*:") and not target:match("^[/\\]") and not target:match("%.%.")
end

local function link(element)
  local target = element.target
  if element.classes:includes("csv") and not is_html then return {} end
  if target:match("^runs/") and not is_html then return element.content end
  if target:match("^https?://") or target:match("^#") or target:match("^mailto:") or local_path(target) then return nil end
  return element.content
end

local function image(element)
  local source = element.src
  if source:match("^data:image/[psj][%w+]*;") or source:match("^attachment:") or local_path(source) then return nil end
  return pandoc.Emph("(picture left out)")
end

local safe = { RawBlock = raw, RawInline = raw, Link = link, Image = image }

local function tables(element)
  for index, spec in ipairs(element.colspecs) do element.colspecs[index] = { spec[1], nil } end  -- as wide as the content
  return element
end

local words = { fig = "Figure", tbl = "Table", sec = "Section" }
local nbsp = "\u{a0}"
local labels, numbers, counters = {}, {}, {}

local function header(element)
  if element.classes:includes("unnumbered") then labels[element.identifier] = pandoc.utils.stringify(element) return end
  if element.level == 1 then counters = { fig = 0, tbl = 0 } end
  numbers[element.level] = (numbers[element.level] or 0) + 1
  for level = element.level + 1, 6 do numbers[level] = 0 end
  labels[element.identifier] = (element.level == 1 and "Chapter" or "Section") .. nbsp .. table.concat(numbers, ".", 1, element.level)
end

local function float(div, kind)
  counters[kind] = (counters[kind] or 0) + 1
  local number = counters[kind]
  if numbers[1] then number = numbers[1] .. "." .. number end
  labels[div.identifier] = words[kind] .. nbsp .. number
  local content = div.content:clone()
  local last = content[#content]
  local caption = (last and (last.t == "Para" or last.t == "Plain") and #content > 1) and content:remove().content or pandoc.Inlines({})
  caption = pandoc.Inlines({ pandoc.Strong(labels[div.identifier] .. "."), pandoc.Space() }) .. caption
  if kind == "tbl" and not is_html then
    for _, block in ipairs(content) do
      if block.t == "Table" then
        block.caption, block.attr = { long = { pandoc.Plain(caption) } }, pandoc.Attr(div.identifier)
        return content
      end
    end
  end
  return pandoc.Figure(content, { pandoc.Plain(caption) }, pandoc.Attr(div.identifier, { kind == "tbl" and "table" or "image" }))
end

local function number(block)
  if block.t == "Header" then header(block) end
  if block.t ~= "Div" then return block end
  local kind = block.identifier:match("^(%a+)%-")
  if kind == "fig" or kind == "tbl" then return float(block, kind) end
  block.content = block.content:map(number)
  return block
end

local function flat(blocks)
  local out = pandoc.Blocks({})
  for _, block in ipairs(blocks) do
    local made = number(block)
    if pandoc.utils.type(made) == "Blocks" then out:extend(made) else out:insert(made) end
  end
  return out
end

local references = {
  Cite = function(cite)
    local out = pandoc.Inlines({})
    for index, citation in ipairs(cite.citations) do
      if not words[citation.id:match("^(%a+)%-") or ""] then return nil end
      if index > 1 then out:extend({ pandoc.Str(","), pandoc.Space() }) end
      local name = labels[citation.id]
      out:insert(name and pandoc.Link(name, "#" .. citation.id) or pandoc.Emph(citation.id .. " (not measured here)"))
    end
    return out
  end,
  Link = function(element)
    local target = element.target:match("^#(.+)")
    if target and not labels[target] then return element.content end
  end,
  Table = function(element)
    if is_html then return pandoc.Div(element, pandoc.Attr("", { "table-box" }, { tabindex = "0", role = "region" })) end
  end,
}

function Pandoc(doc)
  doc = doc:walk(safe):walk({ Table = tables })
  if quarto then return doc end
  doc.blocks = flat(doc.blocks)
  return doc:walk(references)
end
